"""What stands for parts of a predicted step: a few micro-batches for all that are alike, and on fake CPU
tensors something without values, or as on a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from mtaccum.engine import LabelCounts


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


def representatives(labels: LabelCounts, sizes: Sequence[int]) -> dict[int, float]:
    """The micro-batches that tell of all, three of each kind, with how many each stands for. The second finds
    the gradients of the first one, and the last those of all. The kind includes the size in samples."""
    of_kind: dict[Any, list[int]] = {}
    for index, size in enumerate(sizes):
        of_kind.setdefault((size, labels.active_in(index)), []).append(index)
    stands_for: dict[int, float] = {}
    for indices in of_kind.values():
        some = {*indices[:2], indices[-1]}
        stands_for |= {index: len(indices) / len(some) for index in some}
    return dict(sorted(stands_for.items()))


class NotingWindow(list[Any]):
    """A window that notes a number whenever one of its micro-batches begins."""

    def __init__(self, micro_batches: Sequence[Any], noted: Callable[[], int]) -> None:
        super().__init__(micro_batches)
        self._noted = noted

    def __iter__(self) -> Iterator[Any]:
        self._notes = []
        for micro_batch in super().__iter__():
            self._notes.append(self._noted())
            yield micro_batch

    def differences(self) -> list[int]:
        """By how much the number grew during each."""
        return [after - before for before, after in pairwise([*self._notes, self._noted()])]
