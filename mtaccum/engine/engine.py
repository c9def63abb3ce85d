"""The engine: one window in, one optimizer step out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mtaccum.engine.arrangement import Arrangement
from mtaccum.engine.checks import (
    check_alike,
    check_choice,
    check_comm_hook,
    check_hooks,
    check_joined,
    check_model,
    check_nothing_for_step,
    check_offload,
    check_optimizer,
    check_parallel,
    check_positive,
    check_precision,
    check_sharded,
    check_synchronised,
)
from mtaccum.engine.finite import BAD_HOOK, REACTIONS, Skips, all_finite, describe_gradients
from mtaccum.engine.gradients import clip, drop_gradients, gradient_norm, gradients_set_aside
from mtaccum.engine.norms import check_norms, synchronise_norms
from mtaccum.engine.passes import Passes
from mtaccum.engine.precision import Precision, new_scaler
from mtaccum.engine.replay import StateBefore
from mtaccum.engine.result import StepResult
from mtaccum.engine.schedules import SCHEDULES, Backward
from mtaccum.engine.stages import STEP, stage
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import ConfigError, OptimizerError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.ddp import Reducer


class Engine:
    """Turns windows of micro-batches into optimizer steps, one graph at a time.

    The gradient of a step is that of the sum over the tasks of weight * (sum of the task's valid label
    losses in the window) / (their number), whatever the schedule and the number of micro-batches.

    Args:
        model: a MultiTaskModel, on the device where it is to run; micro-batches are moved there one by one.
        optimizer: holds every trainable parameter; None if only ``accumulate`` is used.
        schedule: ``split``, ``sequential`` or ``summed``.
        max_grad_norm: clip the gradient of all tasks together to this norm, once per step; None: don't.
        lr_scheduler: ticks once per optimizer step.
        precision: ``fp32``, the parameters' own precision; ``bf16`` or ``fp16``: autocast to it.
        scaler: a ``torch.amp.GradScaler``; None: with ``fp16`` and an optimizer a new one, otherwise none.
        on_gradients: called with the model between the last backward and clipping; unscaled gradients.
        backward: called once with each head's scaled loss instead of ``loss.backward()`` (``summed``: once
            with their sum).
        on_nonfinite: when a loss or gradient of a step is NaN or infinite: ``raise`` an error that names
            task and place, or ``skip`` the whole step and log it. Gradients that overflow for a scaler's
            factor alone are always skipped. Either way nothing was changed by the step.
        max_skipped: so many steps skipped in a row are an error.
        batchnorm: ``keep``: layers normalise by the micro-batch, and the momentum of running statistics is
            corrected for the number of passes; ``freeze``: they normalise by their running statistics;
            ``sync``: they become ``torch.nn.SyncBatchNorm``.
        recompute: modules that keep no graph and run once more for their backward: names of nodes and of
            modules in them (``trunk.layer1``), patterns (``trunk.layer*``), runs of a Sequential's children
            (``trunk.layer3[0:3]``).
        compile: run each node (of one with recomputed parts: these) by ``torch.compile``; a dict is its
            options.
        groups: lists of tasks on one node whose heads share a backward: small ones are faster so.
        chunks: for a task into how many parts its head and loss take each micro-batch (``split`` only). Each
            tensor of its features is cut along the first dimension; what is no tensor goes into all parts.
        offload: keep saved activations in pinned host memory until the backward (CUDA only).
        parallel: ``ddp``: gradients of a step are averaged over the ranks of PyTorch's process group, once,
            and all weights start as those of rank 0; ``fsdp``: the model was spread over the ranks by
            ``mtaccum.parallel.shard``; ``none``: each rank trains by itself. None: what fits.
        comm_hook: ``fp16`` or ``bf16``: gradients travel between ranks in 16 bits; ``none``: as they are.

    Attributes:
        steps: optimizer steps so far; may be set where a training goes on.
        ranks: the processes that train together.
        skips: counts the steps skipped since something was not finite: ``total`` and ``in_a_row``.

    Raises:
        ConfigError: an argument that isn't valid, or a model inside a foreign parallel wrapper.
        OptimizerError: a trainable parameter that the optimizer doesn't hold, or one that needs a closure.
    """

    def __init__(
        self,
        model: MultiTaskModel,
        optimizer: Optimizer | None = None,
        *,
        schedule: str = "split",
        max_grad_norm: float | None = None,
        lr_scheduler: LRScheduler | None = None,
        precision: str = "fp32",
        scaler: Any = None,
        on_gradients: Callable[[MultiTaskModel], object] | None = None,
        backward: Backward = Tensor.backward,
        on_nonfinite: str = "raise",
        max_skipped: int = 20,
        batchnorm: str = "keep",
        recompute: Sequence[str] = (),
        compile: bool | Mapping[str, Any] = False,
        groups: Sequence[Sequence[str]] = (),
        chunks: Mapping[str, int] | None = None,
        offload: bool = False,
        parallel: str | None = None,
        comm_hook: str = "none",
    ) -> None:
        check_model(model)
        check_hooks(model)
        check_choice("schedule", schedule, SCHEDULES)
        check_choice("on_nonfinite", on_nonfinite, REACTIONS)
        check_positive("max_grad_norm", max_grad_norm)
        check_positive("max_skipped", max_skipped, whole=True)
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau needs a metric; step it yourself after an evaluation.")
        if optimizer is not None:
            check_optimizer(model, optimizer)
        else:
            check_nothing_for_step(
                max_grad_norm=max_grad_norm,
                lr_scheduler=lr_scheduler,
                on_gradients=on_gradients,
                on_nonfinite=None if on_nonfinite == "raise" else on_nonfinite,
            )
        if precision == "fp16" and scaler is None:
            scaler = new_scaler(model.device, steps=optimizer is not None, backward=backward)
        self._precision = Precision(precision, scaler)
        check_precision(model, precision, scaler)
        check_norms(model, batchnorm)
        check_offload(model, offload)
        self.arrangement = Arrangement.of(model, schedule, groups, {} if chunks is None else chunks)
        self.arrangement.check_coupling(model, freezes=batchnorm == "freeze")
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.lr_scheduler = lr_scheduler
        self.scaler = scaler
        self.on_gradients = on_gradients
        self.ranks = check_parallel(model, parallel)
        self._parallel = parallel
        self._reducer = Reducer(self.ranks, comm_hook)
        check_comm_hook(model, comm_hook, self.ranks)
        self.steps = 0
        self.skips = Skips(on_nonfinite, max_skipped)
        passes = partial(
            Passes,
            *(model, self.arrangement, self._precision, self.ranks),
            schedule=schedule,
            backward=backward,
            batchnorm=batchnorm,
            offload=offload,
            recompute=recompute,
            compile=compile,
        )
        self._passes = passes()
        check_synchronised(model, batchnorm, self.ranks)
        check_sharded(
            model,
            compile=compile,
            chunks=self.arrangement.chunks,
            scaler=scaler,
            comm_hook=comm_hook != "none",
        )
        if batchnorm == "sync":  # last: an engine that is refused has changed nothing
            synchronise_norms(model, stacklevel=2)
            self._passes = passes()
        self._warned_of_dropped = False
        self._checked: tuple[tuple[str, bool], ...] = ()
        check_alike(model, self.ranks)
        self.ranks.share(model, *self._parameters())

    def step(self, window: Sequence[Any], plan: WindowPlan | None = None) -> StepResult:
        """One optimizer step from a window of micro-batches. Afterwards every ``.grad`` is None.

        Gradients that were there before are dropped, with a warning: a step's gradient is the window's.

        Args:
            plan: the window's counts, where they are known already (``Engine.plan``); None: counted here.

        Raises:
            LabelError: a label out of range, before any forward.
            TaskError: a head or loss failed. Nothing was changed; no gradient is left.
            InplaceError: a head writes into the features it was given.
            FeatureError: features of a type that can't be taken apart.
            BatchError: the window is no list of batches, or a batch lacks an entry.
            NonfiniteError: a loss or gradient is NaN or infinite, or too many steps were skipped for that.
            OptimizerError: a trainable parameter that the optimizer doesn't hold.
        """
        if self.optimizer is None:
            raise OptimizerError("step() needs an optimizer; this engine has none. Use accumulate().")
        check_joined(self.ranks, self._parallel)
        self._check_optimizer_again()
        parameters = self._parameters()
        self._warn_of_dropped(drop_gradients(parameters))
        before = StateBefore(self.model)
        try:
            result = self._passes.gradient(window, plan)
            if not result.losses:
                return result
            self._reducer.reduce(parameters)
            self._precision.unscale(self.optimizer)
            norm = gradient_norm(parameters)
            if not all_finite([norm, *result.losses.values()]):
                return self._skip(window, result, parameters, before)
            if self.on_gradients is not None:
                self.on_gradients(self.model)
                norm = gradient_norm(parameters)
                if any(self.ranks.largest([float(not all_finite([norm]))])):
                    return self._skip(window, result, parameters, before, BAD_HOOK)
            if self.max_grad_norm is not None:
                clip(parameters, self.max_grad_norm, norm)
            with stage("optimizer", STEP):
                self._precision.step(self.optimizer)
            self._precision.update()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.steps, self.skips.in_a_row = self.steps + 1, 0
            return replace(result, grad_norm=norm, stepped=True)
        except BaseException:
            before.restore()
            self._precision.reset()
            raise
        finally:
            drop_gradients(parameters)

    def accumulate(self, window: Sequence[Any], plan: WindowPlan | None = None) -> StepResult:
        """Add the window's gradient to ``.grad`` and don't step, for loops owned by others.

        It adds to what is there: two calls add two means, each over its own window. For one mean over
        several batches give them as one window. Gradients that are there already are set aside until the
        new ones are complete, so that there are two sets of them meanwhile. With a scaler the gradients
        are scaled, and unscaling, stepping and looking for values that aren't finite are left to the loop.

        Raises:
            LabelError, TaskError: as in ``step``; the gradients are then as they were before.
        """
        check_joined(self.ranks, self._parallel)
        with gradients_set_aside(list(self.model.parameters())):
            return self._passes.gradient(window, plan)

    def plan(self, window: Sequence[Any]) -> WindowPlan:
        """The counts of a window as a step needs them, chunks included."""
        return self._passes.plan(window)

    def _skip(
        self,
        window: Sequence[Any],
        result: StepResult,
        parameters: Sequence[nn.Parameter],
        before: StateBefore,
        culprit: str | None = None,
    ) -> StepResult:
        """Undo a window in which something was not finite, and find out what."""
        self.skips.add()
        overflow = self._precision.scales and culprit is None and all_finite(list(result.losses.values()))
        finding = culprit or describe_gradients(parameters, self.ranks)
        drop_gradients(parameters)
        if overflow and not self.skips.exhausted:
            finding = f"the gradients overflowed at a loss scale of {self.scaler.get_scale():g}"
        elif culprit is None:
            finding = self._passes.find_nonfinite(window, before) or finding
        before.restore_buffers()
        self.skips.report(self.steps + 1, finding, expected=overflow)
        self._precision.update()
        return replace(result, nonfinite=finding)

    def _parameters(self) -> list[nn.Parameter]:
        """Those of the model, and what else the optimizer may hold, such as learned weights of the losses."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        held = [parameter for group in groups for parameter in group["params"]]
        return list({id(parameter): parameter for parameter in [*self.model.parameters(), *held]}.values())

    def _check_optimizer_again(self) -> None:
        """Tasks may have been switched on since the last check."""
        assert self.optimizer is not None
        learning = tuple((task.mode, task.enabled) for task in self.model.tasks_by_name().values())
        if learning != self._checked:
            check_optimizer(self.model, self.optimizer)
            self._checked = learning

    def _warn_of_dropped(self, dropped: int) -> None:
        if dropped and not self._warned_of_dropped:
            self._warned_of_dropped = True
            warnings.warn(
                f"step() dropped gradients that were there before it ({dropped} parameters). To add to "
                f"gradients of your own use accumulate() and step the optimizer yourself.",
                stacklevel=3,
            )
