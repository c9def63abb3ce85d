"""The engine: one window in, one optimizer step out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mtaccum.engine.checks import check_fit, check_hooks, check_model
from mtaccum.engine.gradients import drop_gradients, gradients_dropped_on_error, gradients_set_aside
from mtaccum.engine.label_counts import LabelCounts
from mtaccum.engine.nonfinite import BAD_HOOK, SkippedSteps, all_finite, describe_gradients
from mtaccum.engine.norms import synchronise_norms
from mtaccum.engine.optimizers import Optimizers
from mtaccum.engine.options import StepOptions, takes_step_options
from mtaccum.engine.precision import Precision, new_scaler
from mtaccum.engine.result import StepResult
from mtaccum.engine.run import WindowRun
from mtaccum.engine.schedules import Backward
from mtaccum.errors import ConfigError, OptimizerError, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.observe import STEP, stage
from mtaccum.parallel import Ranks, ranks_for
from mtaccum.state import Snapshot


@takes_step_options
class Engine:
    """Turns windows of micro-batches into optimizer steps, one graph at a time.

    The gradient of a step is that of the sum over the tasks of weight * (sum of the task's valid label
    losses in the window) / (their number), whatever the schedule and the number of micro-batches.

    Args:
        model: a MultiTaskModel, on the device where it is to run; micro-batches are moved there one by one.
        optimizer: holds every trainable parameter; several in a list if each holds some of them (Muon for
            matrices, AdamW for the rest); None if only ``accumulate`` is used.
        options: how steps are run, as a plan returns them; None: ``StepOptions()``.
        lr_scheduler: ticks once per optimizer step; several in a list.
        scaler: a ``torch.amp.GradScaler``; None: with ``precision="fp16"`` and an optimizer a new one,
            otherwise none.
        on_gradients: called with the model between the last backward and clipping; unscaled gradients.
        backward: called once with each head's scaled loss instead of ``loss.backward()`` (``summed``: once
            with their sum).
        parallel: ``ddp``: gradients of a step are averaged over the ranks of PyTorch's process group, once,
            and all weights start as those of rank 0; ``fsdp``: the model was sharded by
            ``mtaccum.parallel.shard``; ``none``: each rank trains by itself. None: what fits. Or a
            ``Ranks`` of your own.
        step_options: single options by their names in ``StepOptions``: ``schedule="split"``,
            ``max_grad_norm=1.0``, ``recompute=["trunk"]``. They go before those in ``options``.

    Attributes:
        options: how steps are run.
        ranks: the processes that train together.
        optimizers: those that it steps.
        steps: optimizer steps so far; may be set where a training goes on.
        skipped_steps: those since something was not finite: ``total`` and ``in_a_row``.

    Raises:
        ConfigError: an argument that isn't valid, or a model inside a foreign parallel wrapper.
        OptimizerError: a trainable parameter that the optimizer doesn't hold, or one that needs a closure.
    """

    def __init__(
        self,
        model: MultiTaskModel,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        options: StepOptions | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: Any = None,
        on_gradients: Callable[[MultiTaskModel], object] | None = None,
        backward: Backward = Tensor.backward,
        parallel: str | Ranks | None = None,
        **step_options: Any,
    ) -> None:
        check_model(model)
        check_hooks(model)
        self.options = (StepOptions() if options is None else options).changed(step_options)
        self.model, self.optimizer = model, optimizer
        self.lr_scheduler, self.on_gradients = lr_scheduler, on_gradients
        self.optimizers = Optimizers(optimizer)
        self._check_optimizers()
        if self.options.precision == "fp16" and scaler is None:
            scaler = new_scaler(model.device, steps=optimizer is not None, backward=backward)
        self.scaler = scaler
        self._precision = Precision(self.options.precision, scaler)
        check_fit(model, self.options, scaler)
        self.ranks = ranks_for(model, parallel, self.options.comm_hook)
        self.ranks.check(model, self.options, scaler)
        self.steps = 0
        self.skipped_steps = SkippedSteps(self.options.on_nonfinite, self.options.max_skipped)
        self._run = WindowRun(model, self.options, self.ranks, self._precision, backward)
        if self.options.batchnorm == "sync":  # last: an engine that is refused has changed nothing
            synchronise_norms(model)
            self._run = WindowRun(model, self.options, self.ranks, self._precision, backward)
        self._warned_of_dropped = False
        self._checked: Any = None
        self.ranks.start(model, self._parameters())

    def step(self, window: Sequence[Any], counts: LabelCounts | None = None) -> StepResult:
        """One optimizer step from a window of micro-batches. Afterwards every ``.grad`` is None.

        Gradients that were there before are dropped, with a warning: a step's gradient is the window's.

        Args:
            counts: the window's label counts, where they are known already (``Engine.count_labels``); None:
                counted here.

        Raises:
            LabelError: a label out of range, before any forward.
            TaskError: a head or loss failed. Nothing was changed; no gradient is left.
            InplaceError: a head writes into the features it was given.
            FeatureError: features of a type that can't be taken apart.
            BatchError: the window is no list of batches, or a batch lacks an entry.
            NonfiniteError: a loss or gradient is NaN or infinite, or too many steps were skipped for that.
            OptimizerError: a trainable parameter that the optimizer doesn't hold, or an optimizer that failed
                while it wrote, in this step or in one before, and no state was loaded since.
        """
        if not self.optimizers:
            raise OptimizerError("step() needs an optimizer; this engine has none. Use accumulate().")
        self.optimizers.refuse_torn()
        self.ranks.before_step(self.model)
        parameters = self._parameters()
        self._check_held_again(parameters)
        self._warn_of_dropped(drop_gradients(parameters))
        before = Snapshot(self.model, without=self.model.frozen_modules())
        try:
            result = self._run.gradient(window, counts)
            if not result.losses:
                return result
            self._run.outside.refuse_unheld(parameters)
            self.ranks.complete(parameters)
            self.optimizers.unscale(self._precision)
            norm = self.ranks.gradient_norm(parameters)
            if not all_finite([norm, *result.losses.values()]):
                return self._skip(window, result, parameters, before)
            if self.on_gradients is not None:
                self.on_gradients(self.model)
                norm = self.ranks.gradient_norm(parameters)
                if self.ranks.any(not all_finite([norm])):
                    return self._skip(window, result, parameters, before, BAD_HOOK)
            if self.options.max_grad_norm is not None:
                self.ranks.clip(parameters, self.options.max_grad_norm, norm)
            with stage("optimizer", STEP):
                self.optimizers.step(self._precision)
        except BaseException:
            before.restore()
            self._precision.reset()
            raise
        finally:
            drop_gradients(parameters)
        # the step is done, whatever raises from here on
        self.steps, self.skipped_steps.in_a_row = self.steps + 1, 0
        self._precision.update()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        return replace(result, grad_norm=norm, stepped=True)

    def accumulate(
        self, window: Sequence[Any], counts: LabelCounts | None = None, *, restore_on_error: bool = False
    ) -> StepResult:
        """Add the window's gradient to ``.grad`` and don't step, for loops owned by others.

        It adds to what is there: two calls add two means, each over its own window. For one mean over
        several batches give them as one window. With a scaler the gradients are scaled, and unscaling,
        stepping and looking for values that aren't finite are left to the loop.

        Args:
            restore_on_error: after an error let gradients be as they were before, rather than None. They are
                then set aside until the new ones are complete, so that there are two sets of them meanwhile,
                as there always are of a sharded model.

        Raises:
            LabelError, TaskError: as in ``step``; all gradients are then None.
        """
        self.ranks.before_step(self.model)
        parameters = list(self.model.parameters())
        onto = any(parameter.grad is not None for parameter in parameters)
        aside = restore_on_error or self.ranks.shares_gradients
        dropped = gradients_dropped_on_error(parameters, had_some=onto, way_out="restore_on_error=True")
        with gradients_set_aside(parameters) if aside else dropped:
            return self._run.gradient(window, counts, onto_others=onto)

    def count_labels(self, window: Sequence[Any]) -> LabelCounts:
        """The label counts of a window as a step needs them, chunks included."""
        return self._run.count_labels(window)

    def _skip(
        self,
        window: Sequence[Any],
        result: StepResult,
        parameters: Sequence[nn.Parameter],
        before: Snapshot,
        culprit: str | None = None,
    ) -> StepResult:
        """Undo a window in which something was not finite, and find out what."""
        self.skipped_steps.add()
        overflow = self._precision.scales and culprit is None and all_finite(list(result.losses.values()))
        finding = culprit or describe_gradients(parameters, self.ranks)
        drop_gradients(parameters)
        if overflow and not self.skipped_steps.exhausted:
            finding = f"the gradients overflowed at a loss scale of {self.scaler.get_scale():g}"
        elif culprit is None:
            finding = self._run.find_nonfinite(window, before) or finding
        before.restore_buffers()
        self.skipped_steps.report(self.steps + 1, finding, expected=overflow)
        self._precision.update()
        return replace(result, nonfinite=finding)

    def _parameters(self) -> list[nn.Parameter]:
        """Those of the model, and what else the optimizer may hold, such as learned weights of the losses."""
        together = [*self.model.parameters(), *self.optimizers.held()]
        return list({id(parameter): parameter for parameter in together}.values())

    @property
    def lr_schedulers(self) -> Sequence[LRScheduler]:
        """Those that tick with it."""
        given = self.lr_scheduler
        return given if isinstance(given, list | tuple) else () if given is None else (given,)

    def _check_optimizers(self) -> None:
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.lr_schedulers):
            raise ConfigError("ReduceLROnPlateau needs a metric; step it yourself after an evaluation.")
        if self.optimizers:
            self.optimizers.check(self.model)
            return
        of_step = {
            "max_grad_norm": self.options.max_grad_norm is not None,
            "lr_scheduler": self.lr_scheduler is not None,
            "on_gradients": self.on_gradients is not None,
            "on_nonfinite": self.options.on_nonfinite != "raise",
        }
        if given := [name for name, is_given in of_step.items() if is_given]:
            raise ConfigError(f"{given[0]} belongs to step(), but this engine has no optimizer.")

    def _check_held_again(self, parameters: Sequence[nn.Parameter]) -> None:
        """Since the last check tasks may have been switched on, parameters unfrozen, modules put in."""
        modes = [(task.mode, task.enabled) for task in self.model.tasks_by_name().values()]
        learning = modes, [id(parameter) for parameter in parameters if parameter.requires_grad]
        if learning != self._checked:
            self.optimizers.check(self.model)
            self._run.outside.forget()
            self._checked = learning

    def _warn_of_dropped(self, dropped: int) -> None:
        if dropped and not self._warned_of_dropped:
            self._warned_of_dropped = True
            warn(
                f"step() dropped gradients that were there before it ({dropped} parameters). To add to "
                f"gradients of your own use accumulate() and step the optimizer yourself."
            )
