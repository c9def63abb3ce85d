"""Rows: containers that hold one entry per sample along one axis, and how some of them are taken.

Tensors and arrays are known here, further ones are registered: by users through ``register_split``, and by
``libraries`` for the containers of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtaccum.batch import libraries

Split = Callable[[Any, list[int]], list[Any]]


class Rows(NamedTuple):
    """How a container holds samples.

    Attributes:
        size: how many it holds; None for one without an axis, which belongs to all samples.
        split: the container in pieces of so many samples each.
    """

    size: Callable[[Any], int | None]
    split: Split


_registered: dict[type, Rows] = {}


def register_split(cls: type, split: Split, size: Callable[[Any], int] = len) -> None:
    """Teach mtaccum a container of your own that holds samples (a graph batch, say), as a batch or in one.

    Args:
        cls: the type; subclasses are included.
        split: ``split(batch, sizes)`` returns one container per entry of ``sizes``, of that many samples.
        size: ``size(batch)`` returns how many samples it holds.
    """
    _registered[cls] = Rows(size, split)


def rows_of(value: Any) -> Rows | None:
    """How a value holds samples; None if it isn't known to hold any."""
    for cls in type(value).__mro__:
        if cls in _registered:
            return _registered[cls]
    if isinstance(value, Tensor | np.ndarray):
        return _nested if isinstance(value, Tensor) and value.is_nested else _array
    found = libraries.container_of(value)
    return None if found is None else Rows(found.size, _by_slices(found.take))


def _by_slices(take: Callable[[Any, slice], Any]) -> Split:
    def split(value: Any, sizes: list[int]) -> list[Any]:
        pieces, start = [], 0
        for size in sizes:
            pieces.append(take(value, slice(start, start + size)))
            start += size
        return pieces

    return split


def _take_of_array(value: Any, rows: slice) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:  # which has no slices
        return value.index_select(0, torch.arange(rows.start, rows.stop, device=value.device))
    return value[rows]


def _take_of_nested(value: Tensor, rows: slice) -> Tensor:
    taken = value.unbind()[rows]
    return torch.nested.as_nested_tensor(list(taken), layout=value.layout)


_array = Rows(lambda value: len(value) if value.ndim else None, _by_slices(_take_of_array))
_nested = Rows(lambda value: int(value.size(0)), _by_slices(_take_of_nested))
