"""Moving batches to a device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.batch.samples import unknown
from mtaccum.structure import hides_tensors, unpacker


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; the very same object if they are there already.

    Containers of Python's own and dataclasses are rebuilt. An object with a ``to(device)`` of its own is
    moved by that, on a copy, since it may work in place.

    Raises:
        BatchError: an object that holds tensors, and that nobody can move.
    """
    if isinstance(batch, Tensor):
        return batch if _same_device(batch.device, device) else batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, nn.Module | type):
        own = copy.copy(batch)
        moved = own.to(device)
        return own if moved is None else moved
    handler = unpacker(batch)
    if handler is None:
        if device.type != "cpu" and hides_tensors(batch, (Tensor,)):
            raise unknown(batch)
        return batch
    unpack, pack = handler
    members = list(unpack(batch))
    moved = [to_device(member, device) for member in members]
    return batch if all(new is old for new, old in zip(moved, members, strict=True)) else pack(batch, moved)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)
