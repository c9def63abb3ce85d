"""What can't be predicted, and what was given wrongly: said before PyTorch says it in its own words."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from mtaccum.errors import (
    BatchError,
    ConfigError,
    MeasureError,
    PredictionError,
    TaskError,
    first_line,
    listed,
)
from mtaccum.model import MultiTaskModel
from mtaccum.observe import any_module_entered
from mtaccum.structure import describe, tensors_of
from mtaccum.torch_internals import DataDependentOutput, DynamicOutputShape, UnsupportedOperator, is_lazy

_KEPT = "their kernels keep what isn't seen"
_BUILD_OPTIMIZER = "such as lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"


def check_arguments(build_model: Any, batch: Any, build_optimizer: Any) -> None:
    """Refuse what isn't what a prediction takes: functions, and a batch with values."""
    if isinstance(build_model, nn.Module) or not callable(build_model):
        raise ConfigError(
            f"build_model must be a function that returns a MultiTaskModel, got {describe(build_model)}. "
            f"For a model that is there already give lambda: model; it stays as it is."
        )
    a_class = isinstance(build_optimizer, type)
    if a_class or isinstance(build_optimizer, Optimizer) or not callable(build_optimizer):
        given = build_optimizer.__name__ if a_class else describe(build_optimizer)
        raise ConfigError(
            f"build_optimizer must be a function of the model that returns its optimizer, "
            f"{_BUILD_OPTIMIZER}, got {given}."
        )
    if any(tensor.is_meta for tensor in tensors_of(batch, strict=False)):
        raise BatchError("the batch is on the device meta, and its labels are counted: give a real one.")


def check_optimizer(optimizer: Any) -> Optimizer:
    """What a function has made, if it is an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"build_optimizer must return an optimizer, {_BUILD_OPTIMIZER}, and it returned "
            f"{describe(optimizer)}."
        )
    return optimizer


def check_model(model: Any) -> None:
    """Refuse what can't be predicted.

    Raises:
        ConfigError: no MultiTaskModel, or parameters without shapes.
        PredictionError: recurrent layers, TorchScript, or sparse gradients.
    """
    if not isinstance(model, MultiTaskModel):
        raise ConfigError(f"build_model must return a MultiTaskModel, and it returned {describe(model)}.")
    empty = [n for n, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if empty:
        raise ConfigError(
            f"lazy modules have no shapes yet: {listed(empty)}. In build_model give them their sizes, or run "
            f"the model once on a batch."
        )
    recurrent = [n for n, m in model.named_modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
    scripts = [n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    sparse = [
        n for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
    ]
    for what, why, names in (
        ("recurrent layers", _KEPT, recurrent),
        ("TorchScript modules", "nobody can look into them", scripts),
        ("sparse gradients", "it depends on values", sparse),
    ):
        if names:
            raise PredictionError(
                f"the memory of {what} can't be predicted, since {why}: {listed(names)}. Measure it: "
                f"mtaccum.memory.measure_step."
            )


class NoRecurrence(TorchFunctionMode):
    """Refuses recurrent layers that are no modules: ``torch.lstm``, ``torch.gru_cell`` and so on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RECURRENT:
            raise PredictionError(
                f"the memory of recurrent layers can't be predicted, since {_KEPT}: torch.{func.__name__}. "
                f"Measure it: mtaccum.memory.measure_step."
            )
        return func(*args, **(kwargs or {}))


_RECURRENT = frozenset(
    getattr(torch, f"{kind}{cell}")
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for cell in ("", "_cell")
)


NO_SAVED_HOOKS = "hooks on saved tensors don't work inside of torch.func.grad, vjp, jacrev and hessian"


def _uses_functorch(error: BaseException) -> bool:
    return "support saved tensor hooks" in str(error)


@contextmanager
def measurable() -> Iterator[None]:
    """Tell a step that can't be measured from one that fails.

    Raises:
        MeasureError: in place of what only measuring has caused.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # a task's code may have met it
            if isinstance(cause, MeasureError):
                raise cause from None
            cause = cause.__cause__
        if _uses_functorch(error):
            raise MeasureError(f"the memory of this step can't be measured: {NO_SAVED_HOOKS}.") from error
        raise


@contextmanager
def explained(model: nn.Module, what_runs: str = "the step") -> Iterator[None]:
    """Say which module needs what fake tensors don't have.

    Args:
        what_runs: named where no module has begun.

    Raises:
        PredictionError: in place of PyTorch's own errors.
    """
    entered: list[str] = []
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module) -> None:
        if id(module) in names:
            entered.append(names[id(module)])

    try:
        with any_module_entered(note):
            yield
    except (PredictionError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error.__cause__, PredictionError):  # a task's code has met it
            raise error.__cause__ from None
        where = f"after {entered[-1]} began" if entered and entered[-1] else f"in {what_runs}"
        if _uses_functorch(error):
            raise PredictionError(
                f"the memory of this model can't be predicted, nor measured, since {NO_SAVED_HOOKS} "
                f"({where})."
            ) from error
        what = _needs_values(error)
        if what is None and isinstance(error, AssertionError) and _is_pytorchs(error):
            raise TaskError(
                f"a step fails on this batch: {first_line(error)}. Engine.step on it says where."
            ) from error
        if what is None:
            raise
        raise PredictionError(
            f"the memory of this model can't be predicted, since it can't run without values: {what} "
            f"({where}). {_advice(error)}Measure it: mtaccum.memory.measure_step."
        ) from error


_SAID = ("FakeTensor", "fake tensor", "Fake mode", "tensor subclasses", "shape_env")
_NEEDS_VALUES = DataDependentOutput, DynamicOutputShape, UnsupportedOperator


def _needs_values(error: BaseException | None) -> str | None:
    """The op that needed values, if that is the cause of an error."""
    while error is not None:
        if isinstance(error, _NEEDS_VALUES):
            return f"{error.func}"
        text = str(error)
        if any(words in text for words in _SAID):
            return text.splitlines()[0][:200]
        error = error.__cause__
    return None


def _is_pytorchs(error: BaseException) -> bool:
    """Whether PyTorch raised an error: its functions on fake tensors assert what its kernels explain."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return Path(torch.__file__).parent in raised.parents


def _advice(error: BaseException | None) -> str:
    """A way out, where there is one."""
    while error is not None:
        if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__)):
            return "A transformer layer looks whether its mask is causal, unless it is told by is_causal=. "
        error = error.__cause__
    return ""
