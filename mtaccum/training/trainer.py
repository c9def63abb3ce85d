"""The training loop: windows in, steps, evaluations and checkpoints out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from mtaccum.batch import windows
from mtaccum.data import MicroBatchSampler, loaded
from mtaccum.engine import Engine, StepResult
from mtaccum.errors import BatchError, MeasureError, NonfiniteError, warn
from mtaccum.memory import PeakReport, measure_step
from mtaccum.model import MultiTaskModel
from mtaccum.parallel import in_step
from mtaccum.training.checkpoint import BEST, LAST, save_checkpoint
from mtaccum.training.display import Display
from mtaccum.training.evaluation import Evaluation, evaluate, weighted_loss
from mtaccum.training.interrupt import Interrupt, interruptible
from mtaccum.training.loggers import Logger
from mtaccum.training.pictures import Pictures, log_timeline
from mtaccum.training.settings import Outcome, TrainerSettings
from mtaccum.training.state import load_state, state_of


class Trainer:
    """Drives an engine over a loader, evaluates, logs, and keeps the last and the best state in a folder.

    Args:
        engine: has the model, an optimizer, and a scheduler if there is one.
        loader: batches by ``sampler``.
        sampler: splits an epoch into batches, and these into micro-batches.
        validation: batches to evaluate on.
        settings: when to do what.
        folder: an existing folder for the checkpoints.
        loggers: are told the numbers; not closed here.

    With several ranks each has a trainer, and all of them take every step; rank 0 writes and prints.
    """

    def __init__(
        self,
        engine: Engine,
        loader: DataLoader[Any],
        sampler: MicroBatchSampler,
        validation: DataLoader[Any],
        settings: TrainerSettings,
        folder: Path,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.engine, self.model = engine, engine.model
        self.loader, self.sampler, self.validation = loader, sampler, validation
        self.settings, self.folder, self.loggers = settings, folder, loggers
        self.ranks = engine.ranks.collectives
        decay = settings.ema_decay
        self.average = None if decay is None else averaged(self.model, decay)
        self.steps = self.micro_batches = self.samples = self.epoch = self.samples_in_epoch = 0
        self.best: float | None = None
        self.evaluations_since_best = self.evaluated_steps = 0
        self.peak: PeakReport | None = None
        self._measures = self.model.device.type in ("cpu", "cuda")  # still, and once
        self.saved_steps: int | None = None
        """Steps of the state that was saved last, by this process; None if it has saved none."""
        self._stepping = False
        self._lr = 0.0
        self._pictures = Pictures(settings.pictures)

    @property
    def evaluated_model(self) -> MultiTaskModel:
        """The model whose metrics are reported: the averaged one if there is one."""
        return self.model if self.average is None else cast(MultiTaskModel, self.average.module)

    def fit(self) -> Outcome:
        """Train to the end, or to an interruption between two steps; the last state is in the folder then.

        Raises:
            BatchError: a whole epoch without any label.
            NonfiniteError: as ``Engine.step``; the state before that step is in the folder then.
            KeyboardInterrupt: interrupted in a step too long to wait for; the folder has the state that
                was saved before.
        """
        started = time.monotonic()
        evaluated_at: dict[int, Evaluation] = {}
        display = Display(self.settings.total_steps, shown=self.ranks.is_rank_zero)
        evaluation: Evaluation = {}
        if self.steps == 0:
            self._save(LAST)  # so that there is one to go on from, and a full disk is found out now
        try:
            with interruptible() as interrupt:
                try:
                    evaluated_at = self._run(interrupt, display)
                except KeyboardInterrupt:
                    if self._stepping or self.ranks.world_size > 1:
                        raise  # between two states, or other ranks are; the last one saved is whole
                    interrupt.requested = True
                except NonfiniteError:
                    self._save(LAST)  # the step left everything as it was before it
                    raise
            self._save(LAST)
            if not interrupt.requested:
                evaluation = evaluated_at.get(self.steps) or self._evaluate(display)
                self._save(LAST)
        finally:
            display.close()
        return Outcome(
            self.steps,
            self.micro_batches,
            self.samples,
            evaluation,
            self.peak,
            interrupt.requested,
            time.monotonic() - started,
        )

    def _run(self, interrupt: Interrupt, display: Display) -> dict[int, Evaluation]:
        """The steps; returns the last evaluation by step."""
        settings, last = self.settings, {}
        if _due(self.steps, settings.eval_every) and self.evaluated_steps < self.steps:
            last = {self.steps: self._evaluate(display)}  # what an interruption has prevented
        since, samples_before = time.monotonic(), self.samples
        for window in self._windows():
            result = self._step(window)
            scalars = None
            if result.nonfinite is not None:
                display.say(f"skipped step {self.steps + 1}: {result.nonfinite}")
            if result.stepped:
                if _due(self.steps, settings.log_every) or self.steps == settings.total_steps:
                    elapsed_s = max(time.monotonic() - since, 1e-9)
                    scalars = self._scalars(result, (self.samples - samples_before) / elapsed_s)
                    self._log(scalars)
                display.step(self.steps, scalars)
                if _due(self.steps, settings.eval_every):
                    last = {self.steps: self._evaluate(display)}
                if _due(self.steps, settings.checkpoint_every):
                    self._save(LAST)
                if scalars is not None:
                    since, samples_before = time.monotonic(), self.samples
            interrupt.requested = self.ranks.any(interrupt.requested)
            if interrupt.requested:
                interrupt.obey()
            if interrupt.requested or self._stale():
                break
        return last

    def _windows(self) -> Iterator[list[Any]]:
        """Windows up to the last step, through as many epochs as that takes."""
        while self.steps < self.settings.total_steps:
            self.sampler.seek(self.epoch, self.samples_in_epoch)
            whole_epoch, before = self.samples_in_epoch == 0, (self.steps, self.engine.skipped_steps.total)
            for window in in_step(windows(loaded(self.loader), self.sampler.accumulate), self.ranks):
                yield window
                if self.steps == self.settings.total_steps:
                    return
            if whole_epoch and before == (self.steps, self.engine.skipped_steps.total):
                raise BatchError(
                    f"epoch {self.epoch} had no label of any task: nothing can be learned from it."
                )
            self.epoch, self.samples_in_epoch = self.epoch + 1, 0

    def _step(self, window: list[Any]) -> StepResult:
        """One step; the first one with optimizer state, or the only one, is measured."""
        self._stepping = True
        samples = self.sampler.samples_from(self.samples_in_epoch)
        # the step's own; the scheduler ticks in it
        self._lr = self.engine.optimizers.all[0].param_groups[0]["lr"]
        if self._measures and (self.steps > 0 or self.settings.total_steps == 1):
            result = self._measured_step(window)
        else:
            result = self.engine.step(window)
        self.samples_in_epoch += samples
        if result.stepped:
            self.steps += 1
            self.micro_batches += result.micro_batches
            self.samples += samples
            if self.average is not None:
                self.average.update_parameters(self.model)
        self._stepping = False
        return result

    def _measured_step(self, window: list[Any]) -> StepResult:
        """A step whose peak is measured; one that can't be measured is taken all the same."""
        copies = [] if self.average is None else [self.average]
        try:
            result, peak = measure_step(self.engine, window, existing=copies, timeline=True)
        except MeasureError as error:
            self._measures = False
            warn(f"the peak is not measured, and the training goes on: {error}")
            return self.engine.step(window)
        title = f"step {self.steps + 1}: {self.engine.options.schedule}"
        log_timeline(self.steps + 1, title, peak, self.loggers)
        self.peak, self._measures = replace(peak, timeline=()), False
        return result

    def _scalars(self, result: StepResult, samples_per_s: float) -> dict[str, float]:
        assert result.grad_norm is not None
        skips, scaler = self.engine.skipped_steps.total, self.engine.scaler
        return {
            **({"skipped_steps": float(skips)} if skips else {}),
            **({"loss_scale": scaler.get_scale()} if scaler is not None else {}),
            **{f"loss/{name}": loss.item() for name, loss in {**result.losses, **result.loss_terms}.items()},
            **{f"count/{name}": count for name, count in result.counts.items()},
            "lr": self._lr,
            "grad_norm": result.grad_norm.item(),
            "samples_per_s": samples_per_s,
        }

    def _evaluate(self, display: Display) -> Evaluation:
        """Evaluate, log, keep the state if it is the best so far, and draw."""
        self._average_buffers()
        model = self.engine.ranks.evaluated(self.evaluated_model)
        batches = self._pictures.watch(loaded(self.validation), self.loggers)
        evaluation = evaluate(model, batches, self.ranks)
        loss = weighted_loss(self.model, evaluation)
        scalars = {f"val/{name}/{key}": v for name, m in evaluation.items() for key, v in m.items()}
        peak = {} if self.peak is None else {"peak_bytes": float(self.peak.peak_bytes)}
        self._log({"val/loss": loss, **scalars, **peak})
        display.evaluation(self.steps, evaluation)
        monitored = scalars.get(f"val/{self.settings.monitor}", math.nan)
        if self.settings.monitor == "loss":
            monitored = loss
        self.evaluated_steps = self.steps
        if self._better(monitored):
            before = self.best, self.evaluations_since_best
            self.best, self.evaluations_since_best = monitored, 0
            try:
                self._save(BEST)
            except BaseException:  # interrupted: what wasn't kept isn't the best
                self.best, self.evaluations_since_best = before
                raise
        else:
            self.evaluations_since_best += 1
        error = self._draw(model)
        if self.ranks.any(error is not None):  # only rank 0 draws, and all save
            self._save(LAST)
        if error is not None:
            raise error
        return evaluation

    def _draw(self, model: MultiTaskModel) -> Exception | None:
        """Log pictures; the error if a task can't be drawn, which must not cost what was trained."""
        try:
            self._pictures.log(self.steps, model, self.loggers)
        except Exception as error:
            return error
        return None

    def _better(self, value: float) -> bool:
        if self.best is None or math.isnan(self.best):
            return True  # something is better than nothing, also if it is NaN
        return value > self.best if self.settings.maximize else value < self.best

    def _stale(self) -> bool:
        patience = self.settings.patience
        return patience is not None and self.evaluations_since_best >= patience

    def _log(self, scalars: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(self.steps, scalars)

    def _average_buffers(self) -> None:
        for model in (self.model, self.average):
            if model is not None:
                self.ranks.average_buffers(model)

    def _save(self, name: str) -> None:
        self._average_buffers()
        save_checkpoint(self.state_dict(), self.folder / name, self.ranks)
        self.saved_steps = self.steps if name == LAST else self.saved_steps

    def state_dict(self) -> dict[str, Any]:
        """All that goes on from here (``state_of``). To be called on all ranks."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict`` (``load_state``)."""
        load_state(self, state)


def averaged(model: MultiTaskModel, decay: float) -> AveragedModel:
    """A copy of the model that follows an exponential moving average of its weights and buffers."""
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=average, use_buffers=True)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
