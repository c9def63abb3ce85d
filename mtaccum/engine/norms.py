"""BatchNorm under accumulation: it sees the micro-batch, and moves its statistics once for each.

Without a correction K micro-batches move running statistics K times in a step: with momentum 0.1 and K = 4
the old values keep a weight of 0.9^4 instead of 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from mtaccum.engine.lever import Lever
from mtaccum.engine.options import StepOptions
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import ConfigError, listed, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel import in_process_group
from mtaccum.torch_internals import BatchNorm, RunningNorm

_CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_norms(model: MultiTaskModel, policy: str) -> None:
    """Refuse a policy that can't be applied to the model's layers."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BatchNorm)}
    bare = [name for name, layer in layers.items() if layer.running_mean is None]
    if policy == "freeze" and bare:
        raise ConfigError(
            f"batchnorm=freeze normalises by running statistics, but {listed(bare)} keeps none "
            f"(track_running_stats=False). Use batchnorm=keep."
        )
    foreign = [name for name, layer in layers.items() if type(layer) not in _CONVERTIBLE]
    if policy == "sync" and foreign:
        raise ConfigError(
            f"batchnorm=sync can't convert {listed(foreign)}: a {type(layers[foreign[0]]).__name__} may do "
            f"more than normalise. Convert it by the library that it is from."
        )


def synchronise_norms(model: MultiTaskModel) -> None:
    """Replace all BatchNorm layers by ``torch.nn.SyncBatchNorm``; warn where that makes no difference."""
    convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
    for name, child in list(model.named_children()):
        setattr(model, name, convert(child))
    if not in_process_group():
        warn(
            "batchnorm='sync' joins the ranks of a process group, and there is one process only: it does "
            "what batchnorm='keep' does."
        )


def batch_normalised(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the BatchNorm layers in ``module`` that normalise by what they see, and so couple samples."""
    return [
        name
        for name, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, BatchNorm) and (layer.training or layer.running_mean is None)
    ]


class Norms(Lever):
    """The policy for BatchNorm, while windows run."""

    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None:
        self._model, self._policy = model, options.batchnorm

    def running(self, counts: WindowCounts) -> AbstractContextManager[None]:
        return normalising(self._model, self._policy, counts.passes(self._model))


@contextmanager
def normalising(model: MultiTaskModel, policy: str, passes: Mapping[str, int]) -> Iterator[None]:
    """Apply a policy while a window runs, its backwards included; afterwards the layers are as before.

    Args:
        passes: for each node how often it runs in the window.
    """
    attribute = "training" if policy == "freeze" else "momentum"
    values = _frozen(model) if policy == "freeze" else _corrected(model, passes)
    before = [(layer, getattr(layer, attribute)) for layer in values]
    try:
        for layer, value in values.items():
            setattr(layer, attribute, value)
        yield
    finally:
        for layer, value in before:
            setattr(layer, attribute, value)


def _frozen(model: MultiTaskModel) -> dict[nn.Module, bool]:
    return {layer: False for layer in model.modules() if isinstance(layer, BatchNorm) and layer.training}


def _corrected(model: MultiTaskModel, passes: Mapping[str, int]) -> dict[nn.Module, float]:
    """Momentum with which the passes of a window weigh as much as one pass: 1-(1-m)^(1/n).

    A layer that several nodes share would move once for each of them without accumulation, so n is its
    passes over the number of nodes that run it. A frozen node doesn't move its layers.
    """
    if max(passes.values(), default=0) <= 1:
        return {}
    runs: dict[nn.Module, list[int]] = {}
    for name, number in passes.items():
        if number and not model.is_frozen(name):
            for layer in model.node(name).modules():
                if isinstance(layer, RunningNorm) and layer.momentum and layer.running_mean is not None:
                    runs.setdefault(layer, []).append(number)
    return {
        layer: 1 - (1 - float(layer.momentum)) ** (len(numbers) / sum(numbers))  # type: ignore[arg-type]
        for layer, numbers in runs.items()
        if sum(numbers) > len(numbers)
    }
