"""What stands on fake CPU tensors for parts of a step that need a card, or values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer


def as_on_cuda(optimizer: Optimizer) -> None:
    """Choose the implementation that PyTorch would choose on CUDA."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


class NoScaler:
    """Stands for a GradScaler, which reads values; its factors take no memory worth counting."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss * 1.0

    def unscale_(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0)

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        pass

    def get_scale(self) -> float:
        return 1.0

    def is_enabled(self) -> bool:
        return True


@contextmanager
def offloading() -> Iterator[None]:
    """As ``save_on_cpu`` on a device: what is saved leaves it, and comes back for the backward."""

    def pack(tensor: Tensor) -> Any:
        return tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad

    def unpack(packed: Any) -> Tensor:
        size, stride, dtype, requires_grad = packed
        return torch.empty_strided(size, stride, dtype=dtype, requires_grad=requires_grad)

    with saved_tensors_hooks(pack, unpack):
        yield
