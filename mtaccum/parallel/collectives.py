"""Collectives: the small agreements between the processes of a group.

What is agreed on are numbers and names, not gradients. They go over the host's memory (gloo), so that no GPU
has to wait for them. In a single process each of them returns what it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtaccum.torch_internals import timeout_of

T = TypeVar("T")


@dataclass(frozen=True)
class Collectives:
    """The processes that train together, seen from one of them.

    Attributes:
        rank: which one this is, from 0.
        world_size: how many there are.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def host(self) -> Any:
        """The process group for tensors in the host's memory; None in a single process. It isn't held here,
        since a process group ends with the last one that holds it."""
        return None if self.world_size == 1 else _found[0].host

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Over all ranks, of each number."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Over all ranks, of each number."""
        return self._all_reduce(numbers, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        (raised,) = self.all_reduce_max([float(flag)])
        return bool(raised)

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.host)
        return found

    def broadcast_object(self, value: T) -> T:
        """The value that rank 0 has."""
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.host)
        found: T = values[0]
        return found

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on the tensor's device, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_tensors(self, module: nn.Module, *more: Tensor) -> None:
        """Give parameters and buffers, and further tensors, the values that rank 0 has."""
        if self.world_size > 1:
            with torch.no_grad():
                for tensor in {id(t): t for t in (*module.parameters(), *module.buffers(), *more)}.values():
                    if type(tensor.data) is Tensor:  # a DTensor got its values when it was sharded
                        _become(tensor, _of_rank_zero(tensor))

    def average_buffers(self, module: nn.Module) -> None:
        """Give buffers with a fraction (running statistics) their mean over the ranks, and others the values
        of rank 0. What is equal on all ranks stays as it is, to the bit."""
        if self.world_size == 1:
            return
        with torch.no_grad():
            for buffer in module.buffers():
                values = _of_rank_zero(buffer)
                if buffer.dtype in _AVERAGED:
                    difference = torch.where(buffer == values, 0.0, buffer - values)  # inf too may be equal
                    dist.all_reduce(difference)
                    values += difference / self.world_size
                _become(buffer, values)

    def _all_reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        if self.world_size == 1:
            return list(numbers)
        values = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(values, op=operation, group=self.host)
        return values.tolist()


def _of_rank_zero(tensor: Tensor) -> Tensor:
    """The values that rank 0 has, in memory of their own, without gaps: gloo wants that."""
    values = tensor.detach().clone(memory_format=torch.contiguous_format)
    if values.numel():
        dist.broadcast(values.view(-1).view(torch.uint8), src=0)  # gloo doesn't know all dtypes
    return values


def _become(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(tensor, values):  # an expanded constant can't be written to
        tensor.copy_(values)


_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # smaller ones have no arithmetic
_SINGLE = Collectives()


@dataclass(frozen=True)
class _Groups:
    """PyTorch's default process group, a further one for agreements, and the ranks in both."""

    world: Any
    host: Any
    ranks: Collectives


_found: list[_Groups] = []


def in_process_group() -> bool:
    """Whether this process is in a process group with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def current_ranks() -> Collectives:
    """Those of PyTorch's default process group; a single process where there is none."""
    if not in_process_group():
        return _SINGLE
    group = dist.group.WORLD
    if not _found or _found[0].world is not group:
        # a group of its own, so that these agreements never stand in line behind gradients
        host = dist.new_group(backend="gloo", timeout=timeout_of(group))
        _found[:] = [_Groups(group, host, Collectives(dist.get_rank(), dist.get_world_size()))]
    return _found[0].ranks


def forget_groups() -> None:
    """Hold no process group any longer. Gloo's threads end with their group; one that still lets go of a
    tensor when Python ends would end the process by SIGABRT."""
    _found.clear()


def in_step(windows: Iterable[list[T]], ranks: Collectives | None = None) -> Iterator[list[T]]:
    """Windows as long as any rank has one; an empty one where this rank has no more.

    Every rank has to take part in every step. So where ranks have unequal numbers of batches:

        for window in in_step(windows(loader, 4)):
            engine.step(window)

    Args:
        ranks: None: those of PyTorch's default process group.
    """
    ranks = current_ranks() if ranks is None else ranks
    following = iter(windows)
    while True:
        window = next(following, None)
        if not ranks.any(window is not None):
            return
        yield [] if window is None else window
