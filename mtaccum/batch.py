"""Batches as loaders make them: reading an entry, counting and splitting samples, moving to a device.

The lists of them between two optimizer steps are windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtaccum.errors import BatchError, ConfigError
from mtaccum.structure import describe, unpacker

T = TypeVar("T")
Split = Callable[[Any, list[int]], list[Any]]

_splits: dict[type, Split] = {}


def register_split(cls: type, split: Split) -> None:
    """Teach ``split_batch`` a batch type of your own (a graph batch, say).

    Args:
        cls: the type; subclasses are included.
        split: ``split(batch, sizes)`` returns one batch per entry of ``sizes``, of that many samples.
    """
    _splits[cls] = split


def get_field(batch: Any, key: str | int, default: Any = ...) -> Any:
    """An entry of a batch: a mapping's key, a sequence's index, or an object's attribute.

    Raises:
        BatchError: there is no such entry and no ``default`` was given.
    """
    try:
        if isinstance(batch, Mapping) or isinstance(key, int):
            return batch[key]
        return getattr(batch, key)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        if default is not ...:
            return default
        raise BatchError(
            f"the batch has no entry {key!r}; it is {describe(batch)}. Name one of its entries "
            f"(a key, a position or an attribute)."
        ) from error


class Inputs(dict[str, Any]):
    """Several entries of a batch, to be passed as keyword arguments."""


def call(module: Callable[..., Any], features: Any) -> Any:
    """``module(features)``, or ``module(**features)`` where the features are several named inputs."""
    return module(**features) if isinstance(features, Inputs) else module(features)


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch.

    It is the first dimension of the first tensor; where no tensor has one, the length of the first
    list. Lists hold one entry per sample (as detection targets do), but for a batch that is itself a
    list of tensors or lists: its entries are fields, as ``default_collate`` makes them. Tuples hold fields,
    but for those of one object (a dict) per sample, as ``tuple(zip(*samples))`` makes them.

    Raises:
        BatchError: nothing in the batch tells.
    """
    if isinstance(batch, Sized) and not isinstance(batch, Tensor) and len(batch) == 0:
        return 0
    fields = list(batch) if isinstance(batch, tuple) or _is_field_list(batch) else [batch]
    for count in (_objects, _dimension, _list_length):
        for field in fields:
            if (size := _first(field, count)) is not None:
                return size
    if isinstance(batch, Sized) and unpacker(batch) is None:
        return len(batch)
    raise BatchError(
        f"can't tell how many samples a batch of {describe(batch)} has: there is no tensor with a first "
        f"dimension in it, and no list."
    )


def _is_field_list(batch: Any) -> bool:
    return isinstance(batch, list) and not all(map(_is_object, batch))


def _first(nest: Any, count: Callable[[Any], int | None]) -> int | None:
    """The first number that ``count`` finds in a nest and its parts."""
    if (found := count(nest)) is not None:
        return found
    return next((n for part in _parts(nest) if (n := _first(part, count)) is not None), None)


def _objects(nest: Any) -> int | None:
    """Length of a list or tuple of one object (a dict) per sample, as detection targets are."""
    found = isinstance(nest, list | tuple) and nest and all(map(_is_object, nest))
    return len(nest) if found else None


def _is_object(entry: Any) -> bool:
    return isinstance(entry, Mapping) or (dataclasses.is_dataclass(entry) and not isinstance(entry, type))


def _dimension(nest: Any) -> int | None:
    return int(nest.shape[0]) if isinstance(nest, Tensor) and nest.dim() else None


def _list_length(nest: Any) -> int | None:
    return len(nest) if isinstance(nest, list) else None


def _parts(nest: Any) -> list[Any]:
    """What a nest consists of; nothing for a list, which holds samples: a tensor in it has no batch."""
    handler = unpacker(nest)
    return [] if handler is None or isinstance(nest, list) else list(handler[0](nest))


def split_sizes(samples: int, number: int) -> list[int]:
    """Sizes of so many pieces that differ by at most one, larger ones first: 64 in 5 is 13,13,13,13,12."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BatchError(
            f"can't split a batch into {number!r} micro-batches; valid is a whole number from 1."
        )
    if number > samples:
        raise BatchError(
            f"can't split {samples} samples into {number} micro-batches: each needs at least one sample. "
            f"Ask for at most {samples}, or for a larger batch."
        )
    size, larger = divmod(samples, number)
    return [size + 1] * larger + [size] * (number - larger)


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """Split a batch into micro-batches whose sizes differ by at most one sample.

    Tensors are split along their first dimension (into views), lists of one entry per sample likewise;
    tensors without dimensions and plain values go into every micro-batch.

    Args:
        batch: any nest of tensors and lists (see ``batch_size_of`` for how lists are read), or a type
            made known by ``register_split``.
        micro_batches: how many; at most the number of samples.

    Raises:
        BatchError: more micro-batches than samples, or an entry that has another number of samples.
    """
    return _split(batch, split_sizes(batch_size_of(batch), micro_batches))


def take_samples(batch: Any, samples: int) -> Any:
    """The first ``samples`` of a batch (at least 1, at most all of it), taken as by ``split_batch``."""
    rest = batch_size_of(batch) - samples
    return batch if rest == 0 else _split(batch, [samples, rest])[0]


def take_micro_batch(nest: Any, samples: int, micro_batches: int, index: int) -> Any:
    """One of the micro-batches into which ``split_batch`` would split a nest of ``samples`` samples."""
    return _split(nest, split_sizes(samples, micro_batches), [index])[0]


def _split(batch: Any, sizes: list[int], chosen: Sequence[int] | None = None) -> list[Any]:
    """A batch in pieces of these sizes, or those of them with the chosen numbers."""
    chosen = range(len(sizes)) if chosen is None else chosen
    for cls in type(batch).__mro__:
        if cls in _splits:
            pieces = _splits[cls](batch, sizes)
            return [pieces[index] for index in chosen]
    samples = sum(sizes)
    starts = [0, *accumulate(sizes)]
    slices = [slice(starts[index], starts[index + 1]) for index in chosen]
    if _is_field_list(batch):
        return [[_rows(field, rows, samples) for field in batch] for rows in slices]
    if type(batch) is tuple:
        return [tuple(_rows(field, rows, samples) for field in batch) for rows in slices]
    return [_rows(batch, rows, samples) for rows in slices]


def _rows(nest: Any, rows: slice, samples: int) -> Any:
    if isinstance(nest, Tensor):
        if nest.dim() == 0:
            return nest
        if nest.shape[0] != samples:
            raise BatchError(
                f"an entry {describe(nest)} can't be split with a batch of {samples} samples: its first "
                f"dimension is {nest.shape[0]}. Make it {samples} long, or put it into the batch as a "
                f"plain (non-tensor) value."
            )
        return nest[rows]
    if isinstance(nest, list):
        return _rows_of_list(nest, rows, samples)
    if isinstance(nest, np.ndarray) and nest.ndim and len(nest) == samples:
        return nest[rows]
    if type(nest) is tuple and _holds_samples(nest, samples):
        return nest[rows]
    handler = unpacker(nest)
    if handler is None:
        return nest
    unpack, pack = handler
    return pack(nest, [_rows(field, rows, samples) for field in unpack(nest)])


def _rows_of_list(nest: list[Any], rows: slice, samples: int) -> list[Any]:
    if len(nest) == samples:
        return nest[rows]
    if nest and all(_is_batched(entry, samples) for entry in nest):
        return [_rows(entry, rows, samples) for entry in nest]
    raise BatchError(
        f"a list of {len(nest)} entries can't be split with a batch of {samples} samples: lists hold one "
        f"entry per sample, or tensors of {samples} samples. Use a tuple for anything else."
    )


def _holds_samples(nest: tuple[Any, ...], samples: int) -> bool:
    """Whether a tuple has one entry per sample, as ``zip(*samples)`` makes it of a field."""
    if len(nest) != samples or all(_is_batched(entry, samples) for entry in nest):
        return False
    return all(isinstance(entry, Tensor | str) or _is_object(entry) for entry in nest)


def _is_batched(entry: Any, samples: int) -> bool:
    return isinstance(entry, Tensor) and entry.dim() > 0 and entry.shape[0] == samples


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; the very same object if they are there already.

    Containers are rebuilt; an object that can't be taken apart is moved by its own ``.to(device)`` if it
    has one, and passes through unchanged otherwise.
    """
    if isinstance(batch, Tensor):
        return batch if _same_device(batch.device, device) else batch.to(device, non_blocking=True)
    handler = unpacker(batch)
    if handler is None:
        return batch.to(device) if hasattr(batch, "to") else batch
    unpack, pack = handler
    parts = list(unpack(batch))
    moved = [to_device(part, device) for part in parts]
    return batch if all(new is old for new, old in zip(moved, parts, strict=True)) else pack(batch, moved)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def windows(loader: Iterable[T], micro_batches: int = 1) -> Iterator[list[T]]:
    """Lists of up to ``micro_batches`` consecutive batches; the last one holds what is left.

    The batch size is then ``micro_batches`` times the loader's. To keep the batch size and split it into
    micro-batches instead, use ``split_batch``.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches must be a whole number of at least 1, got {micro_batches!r}.")

    def generate() -> Iterator[list[T]]:
        window: list[T] = []
        for batch in loader:
            window.append(batch)
            if len(window) == micro_batches:
                yield window
                window = []
        if window:
            yield window

    return generate()
