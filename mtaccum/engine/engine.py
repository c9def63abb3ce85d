"""The engine: one window in, one optimizer step out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mtaccum.batch import to_device
from mtaccum.engine.bind import bind
from mtaccum.engine.checks import check_hooks, check_model, check_optimizer, check_window
from mtaccum.engine.result import LossLog, StepResult
from mtaccum.engine.schedules import SCHEDULES, Backward
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import ConfigError, InexactWarning, OptimizerError, unknown_name
from mtaccum.model.tree import ROOT, MultiTaskModel


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
        precision: ``fp32``, the parameters' own precision.
        scaler: must be None.
        on_gradients: called with the model between the last backward and clipping.
        backward: called once with each head's scaled loss instead of ``loss.backward()`` (``summed``: once
            with their sum).

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
        scaler: None = None,
        on_gradients: Callable[[MultiTaskModel], object] | None = None,
        backward: Backward = Tensor.backward,
    ) -> None:
        check_model(model)
        check_hooks(model)
        if schedule not in SCHEDULES:
            raise ConfigError(unknown_name("schedule", schedule, SCHEDULES))
        if max_grad_norm is not None and not (0 < max_grad_norm < math.inf):
            raise ConfigError(f"max_grad_norm must be a finite number above 0, got {max_grad_norm!r}.")
        if precision != "fp32" or scaler is not None:
            raise ConfigError(
                f"only precision='fp32' without a scaler is supported so far, got precision={precision!r} "
                f"and scaler={scaler!r}."
            )
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau needs a metric; step it yourself after an evaluation.")
        if optimizer is not None:
            check_optimizer(model, optimizer)
        elif given := [
            name
            for name, value in (
                ("max_grad_norm", max_grad_norm),
                ("lr_scheduler", lr_scheduler),
                ("on_gradients", on_gradients),
            )
            if value is not None
        ]:
            raise ConfigError(f"{given[0]} belongs to step(), but this engine has no optimizer.")
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.lr_scheduler = lr_scheduler
        self.on_gradients = on_gradients
        self.backward = backward
        self._warned: set[str] = set()
        self._checked: tuple[tuple[str, bool], ...] = ()

    def step(self, window: Sequence[Any]) -> StepResult:
        """One optimizer step from a window of micro-batches. Afterwards every ``.grad`` is None.

        Gradients that were there before are dropped, with a warning: a step's gradient is the window's.

        Raises:
            LabelError: a label out of range, before any forward.
            TaskError: a head or loss failed. Nothing was changed but buffers; no gradient is left.
            InplaceError: a head writes into the features it was given.
            FeatureError: features of a type that can't be taken apart.
            BatchError: the window is no list of batches, or a batch lacks an entry.
            OptimizerError: a trainable parameter that the optimizer doesn't hold.
        """
        if self.optimizer is None:
            raise OptimizerError("step() needs an optimizer; this engine has none. Use accumulate().")
        self._check_optimizer_again()
        # the optimizer may hold more than the model, such as learned weights of the losses
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        parameters = list(dict.fromkeys([*self.model.parameters(), *held]))
        if dropped := _drop_gradients(parameters):
            self._warn_once(
                "dropped gradients",
                f"step() dropped gradients that were there before it ({dropped} parameters). To add to "
                f"gradients of your own use accumulate() and step the optimizer yourself.",
                UserWarning,
                stacklevel=3,
            )
        try:
            result = self._accumulate(window)
            if not result.losses:
                return result
            if self.on_gradients is not None:
                self.on_gradients(self.model)
            grad_norm = _clip(parameters, self.max_grad_norm)
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            return replace(result, grad_norm=grad_norm, stepped=True)
        finally:
            _drop_gradients(parameters)

    def accumulate(self, window: Sequence[Any]) -> StepResult:
        """Add the window's gradient to ``.grad`` and don't step, for loops owned by others.

        It adds to what is there: two calls add two means, each over its own window. For one mean over
        several batches give them as one window.

        Raises:
            LabelError, TaskError: as in ``step``; the gradients are then as they were before.
        """
        parameters = list(self.model.parameters())
        with _gradients_set_aside(parameters):
            return self._accumulate(window)

    def _accumulate(self, window: Sequence[Any]) -> StepResult:
        """The window's gradient, into ``.grad`` that are all None."""
        if torch.is_inference_mode_enabled():
            raise ConfigError("nothing can be learned under torch.inference_mode(); leave it first.")
        check_window(self.model, window)
        plan = WindowPlan.of(self.model.tasks_by_name(), window)
        self._warn_inexact(len(window))
        log = LossLog(plan)
        device = self.model.device
        for index, batch in enumerate(window):
            if active := plan.active(index):
                # moved here and bound to no name: on the device is only the micro-batch that runs
                roots, inputs = bind(self.model, to_device(batch, device), plan, index, active, log)
                SCHEDULES[self.schedule](roots, {ROOT: inputs}, self.backward)
                del roots, inputs
        return log.result(micro_batches=len(window))

    def _check_optimizer_again(self) -> None:
        """Tasks may have been switched on since the last check."""
        assert self.optimizer is not None
        learning = tuple((task.mode, task.enabled) for task in self.model.tasks_by_name().values())
        if learning != self._checked:
            check_optimizer(self.model, self.optimizer)
            self._checked = learning

    def _warn_inexact(self, micro_batches: int) -> None:
        tasks = self.model.tasks_by_name()
        inexact = [name for name, task in tasks.items() if task.enabled and not task.additive]
        if inexact and micro_batches > 1:
            self._warn_once(
                "inexact",
                f"the loss of {', '.join(inexact)} is not a mean over labels (additive = False): with "
                f"{micro_batches} micro-batches its gradient is not that of the whole batch. Use one "
                f"micro-batch for exact gradients.",
                InexactWarning,
                stacklevel=5,
            )

    def _warn_once(self, kind: str, message: str, category: type[Warning], stacklevel: int) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, category, stacklevel=stacklevel)  # the line of who called the engine


def _clip(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Norm of all gradients together; clips them to ``max_norm`` if it is given."""
    learned = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([_values(p.grad) for p in learned if p.grad is not None])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(learned, max_norm, norm)
    return norm


def _values(gradient: Tensor) -> Tensor:
    """A sparse gradient's values, which have its norm."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _drop_gradients(parameters: Sequence[nn.Parameter]) -> int:
    """Set all gradients to None, and tell how many weren't."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        parameter.grad = None
    return len(held)


@contextmanager
def _gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients that are there already stay untouched until the new ones are complete."""
    before = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    _drop_gradients(parameters)
    try:
        yield
    except BaseException:
        _drop_gradients(parameters)
        for parameter, gradient in before:
            parameter.grad = gradient
        raise
    with torch.no_grad():
        for parameter, gradient in before:
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.layout == gradient.layout:
                parameter.grad = gradient.add_(parameter.grad)
            else:  # one of them is sparse
                parameter.grad = gradient + parameter.grad
