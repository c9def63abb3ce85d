"""What the benchmarks share: facts about the machine, interleaved timing, and how results are written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markdown_tables import markdown_table

__all__ = [
    "MIB",
    "Ratio",
    "check_device",
    "environment",
    "environment_line",
    "interleaved_times",
    "markdown_table",
    "ratio_of",
    "write_results",
]

MIB = 2**20
_RESAMPLES = 5000


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of two times taken in the same round, with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def interleaved_times(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: str, *, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each step in each of ``rounds`` rounds.

    A round runs every step once, in an order drawn anew: what else the machine does then slows all of
    them alike, and none always runs on caches that the same other one left behind.

    Args:
        steps: what to time, by name.
        warmups: untimed runs of each step before the first round.
    """
    order = random.Random(0)
    for step in steps.values():
        for _ in range(warmups):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            _wait_for(device)
            start = time.perf_counter()
            steps[name]()
            _wait_for(device)
            times[name].append(time.perf_counter() - start)
    return times


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def ratio_of(times: Sequence[float], over: Sequence[float]) -> Ratio:
    """The ratio of two lists of seconds, round by round.

    The interval is the percentile bootstrap (Efron 1979) of the median: rounds drawn with replacement.
    With few rounds it is about their range.
    """
    ratios = np.asarray(times) / np.asarray(over)
    drawn = np.random.default_rng(0).choice(ratios, size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Ratio(statistics.median(ratios.tolist()), float(low), float(high), len(ratios))


def check_device(name: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:1``, if it is there; otherwise the program ends with an explanation."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        sys.exit(f"error: --device must be cpu or cuda (cuda:1 for the second card), got {name!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: this PyTorch finds no CUDA device. Use --device cpu.")
    return name


def environment(device: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Hardware, versions, command and date; no names of hosts or folders.

    Args:
        arguments: the command's arguments without those that name folders.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = os.environ.get("OMP_NUM_THREADS")
    prefix = [] if threads is None else [f"OMP_NUM_THREADS={threads}"]
    return {
        "hardware": {
            "cpu_cores": os.cpu_count(),
            "memory_gib": round(memory_bytes / 2**30),
            "gpu": None if device == "cpu" else torch.cuda.get_device_name(device),
        },
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "system": platform.system(),
        },
        "command": shlex.join([*prefix, "python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "date": datetime.date.today().isoformat(),
    }


def environment_line(facts: Mapping[str, Any]) -> str:
    """The facts of ``environment`` for people."""
    hardware, versions = facts["hardware"], facts["versions"]
    return (
        f"{hardware['cpu_cores']} CPU cores, {hardware['memory_gib']} GiB, {hardware['gpu'] or 'no GPU'}; "
        f"threads: {facts['threads']}; Python {versions['python']}, torch {versions['torch']}, "
        f"{versions['system']}; {facts['date']}; `{facts['command']}`"
    )


def write_results(output: Path, name: str, text: str, results: Mapping[str, Any]) -> None:
    """Writes ``name``.md and ``name``.json into the folder ``output``, and says so."""
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    (output / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten: {output / name}.md and .json")
