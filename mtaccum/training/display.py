"""What a person sees of a training: a live display on a terminal, plain lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mtaccum.training.evaluation import Evaluation


class Display:
    """Shows progress on standard output: a bar on a terminal, anywhere else lines."""

    def __init__(self, total_steps: int, console: Console | None = None, *, shown: bool = True) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False, quiet=not shown)
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal and shown:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[losses]}"),
                console=self._console,
            )
            self._bar = self._progress.add_task("train", total=total_steps, losses="")
            self._progress.start()

    def say(self, message: str) -> None:
        """One line of text."""
        self._console.print(message, markup=False)

    def step(self, step: int, scalars: Mapping[str, float] | None = None) -> None:
        """A step is done; with its scalars if they were logged."""
        losses = "" if scalars is None else _losses(scalars)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)
            if losses:
                self._progress.update(self._bar, losses=losses)
        elif scalars is not None:
            speed = f"{scalars['samples_per_s']:.0f} samples/s"
            self.say(f"step {step}/{self._total_steps}  {losses}  lr {scalars['lr']:.2e}  {speed}")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Validation metrics after a step."""
        tasks = [f"{name}: {_metrics(metrics)}" for name, metrics in evaluation.items()]
        elapsed_s = time.monotonic() - self._started
        self.say(f"validation after step {step} ({elapsed_s:.0f} s)  " + "  |  ".join(tasks))

    def close(self) -> None:
        """Take the live display down; lines may follow."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def print_summary(evaluation: Evaluation, facts: Mapping[str, str]) -> None:
    """The table at the end: each task's validation metrics, then facts about the run."""
    table = Table("", "validation")
    for name, metrics in evaluation.items():
        table.add_row(name, _metrics(metrics))
    table.add_section()
    for name, fact in facts.items():
        table.add_row(name, fact)
    Console(highlight=False).print(table, markup=False)


def _losses(scalars: Mapping[str, float]) -> str:
    return "  ".join(f"{n.split('/', 1)[1]} {v:.3f}" for n, v in scalars.items() if n.startswith("loss/"))


def _metrics(metrics: Mapping[str, float]) -> str:
    shown = [f"{key} {value:.3f}" for key, value in metrics.items() if not math.isnan(value)]
    return ", ".join(shown) or "no labels"
