"""Precision: in which type the forwards run, and how losses are scaled for it.

Micikevicius et al., Mixed Precision Training, 2018, by PyTorch's autocast and GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mtaccum.engine.schedules import Backward
from mtaccum.errors import ConfigError

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALER = ("scale", "unscale_", "step", "update", "get_scale")


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Around a window: inside a caller's autocast, use no weight that it cast before, perhaps without a
    graph, and leave none, since a step changes the weights."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def new_scaler(device: torch.device, *, steps: bool, backward: Backward) -> Any:
    """The scaler for fp16 of an engine that was given none; None where its ``backward`` has to scale.

    Raises:
        ConfigError: the engine doesn't step, so that nobody would unscale, and nothing scales.
    """
    if steps:
        return torch.amp.GradScaler(device.type)
    if backward is Tensor.backward:
        raise ConfigError(
            "precision='fp16' needs scaled losses, or small gradients become 0: pass the scaler that your "
            "loop steps with, or a backward= that scales."
        )
    return None


class Precision:
    """How an engine's forwards are cast, and its losses scaled.

    Raises:
        ConfigError: a scaler that isn't one.
    """

    def __init__(self, name: str, scaler: Any) -> None:
        if scaler is not None and not all(callable(getattr(scaler, method, None)) for method in _SCALER):
            raise ConfigError(f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}.")
        self.name = name
        self.scaler = scaler
        self._dtype = _DTYPES[name]
        self._unscaled: set[int] = set()  # optimizers, by id
        self._has_scaled = False

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied by a factor, so that gradients may overflow for it."""
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward of one node. Not around several: autocast keeps the weights that it has cast
        until it is left, and those cast in a forward without a graph lead nowhere."""
        return nullcontext() if self._dtype is None else torch.autocast(device.type, self._dtype)

    def scaled(self, backward: Backward) -> Backward:
        """``backward`` with the loss scaled first."""
        return (lambda loss: backward(self._scale(loss))) if self.scales else backward

    def _scale(self, loss: Tensor) -> Tensor:
        self._has_scaled = True
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Gradients as they would be without scaling; once per step, if there are any."""
        held = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        if self.scales and (gradient := next(held, None)) is not None:
            if not self._has_scaled:  # without a batch: a scaler makes its factor when it is first used
                self._scale(torch.zeros((), device=gradient.device))
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, once the gradients are unscaled and known to be finite."""
        if id(optimizer) in self._unscaled:
            self.scaler.step(optimizer)
        else:
            optimizer.step()

    def update(self) -> None:
        """Once per step, skipped ones included: the factor for the next one."""
        if self._unscaled:
            self.scaler.update()
            self._unscaled.clear()

    def reset(self) -> None:
        """After a step that failed: the scaler as it was before."""
        if self._unscaled:
            self.scaler.update(self.scaler.get_scale())  # what was unscaled is forgotten, the factor stays
            self._unscaled.clear()
