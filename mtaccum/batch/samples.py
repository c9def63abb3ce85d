"""Samples of a batch: how many there are, and micro-batches of some of them.

How each value in it holds the samples is read by ``reading``, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from mtaccum.batch.reading import Read, fit, is_object, is_zipped, members, read
from mtaccum.batch.rows import rows_of
from mtaccum.errors import BatchError
from mtaccum.structure import describe, hides_tensors, unpacker
from mtaccum.values import whole_number

# --- how many samples ---


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: that by which all of it can be read.

    Raises:
        BatchError: nothing in the batch tells.
    """
    if isinstance(batch, list | tuple | Mapping) and len(batch) == 0:
        return 0
    found = sorted(_sizes(batch, is_batch=True), key=lambda size: size[0])
    sizes = [size for _, size in found]
    for size in dict.fromkeys(sizes):
        if (how := read(batch, size, is_batch=True)) is Read.UNCLEAR:
            raise _unclear(batch, size)
        if how is Read.ROWS or (how is Read.FIELDS and fit(members(batch), size)):
            return size
    if sizes:  # some entry is of another size; whoever splits it will say so
        return Counter(sizes).most_common(1)[0][0]
    if isinstance(batch, Sized) and unpacker(batch) is None:
        return len(batch)
    if hides_tensors(batch):
        raise unknown(batch)
    raise BatchError(
        f"can't tell how many samples a batch of {describe(batch)} has: there is no tensor with a first "
        f"dimension in it, and no list."
    )


def _sizes(value: Any, *, is_batch: bool = False) -> Iterator[tuple[int, int]]:
    """How many samples a value may hold, each after a rank; the lowest is the likeliest."""
    if (rows := rows_of(value)) is not None:
        if (count := rows.size(value)) is not None:
            yield 1, count
        return
    if isinstance(value, list) or type(value) is tuple:
        of_objects, is_list = bool(value) and all(map(is_object, value)), isinstance(value, list)
        if of_objects and (is_list or not is_batch):
            yield 0, len(value)
            return
        yield (4 if is_batch else 2 if is_list else 3), len(value)
        later = 4 if is_list and not is_batch else 0  # what is in a list's entries is each sample's own
    else:
        later = 0
    for member in members(value):
        yield from ((max(rank, later), size) for rank, size in _sizes(member))


# --- splitting ---


def split_sizes(samples: int, number: int) -> list[int]:
    """Sizes of so many pieces that differ by at most one, larger ones first: 64 in 5 is 13,13,13,13,12."""
    pieces = whole_number(number)
    if pieces is None or pieces < 1:
        raise BatchError(
            f"can't split a batch into {number!r} micro-batches; valid is a whole number from 1."
        )
    if pieces > samples:
        raise BatchError(
            f"can't split {samples} samples into {pieces} micro-batches: each needs at least one sample. "
            f"Ask for at most {samples}, or for a larger batch."
        )
    size, larger = divmod(samples, pieces)
    return [size + 1] * larger + [size] * (pieces - larger)


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """Split a batch into micro-batches whose sizes differ by at most one sample.

    Rows (tensors, arrays, lists of one entry per sample, containers of known libraries) are split, tensors
    into views; what belongs to all samples goes into every micro-batch.

    Args:
        batch: any nest of these, or a type made known by ``register_split``.
        micro_batches: how many; at most the number of samples.

    Raises:
        BatchError: more micro-batches than samples, an entry that has another number of samples, or one
            that can't be taken apart.
    """
    return _split(batch, split_sizes(batch_size_of(batch), micro_batches))


def take_samples(batch: Any, samples: int) -> Any:
    """The first ``samples`` of a batch (at least 1, at most all of it), taken as by ``split_batch``."""
    rest = batch_size_of(batch) - samples
    return batch if rest == 0 else _split(batch, [samples, rest])[0]


def take_micro_batch(nest: Any, samples: int, micro_batches: int, index: int) -> Any:
    """One of the micro-batches into which ``split_batch`` would split a nest of ``samples`` samples."""
    sizes = split_sizes(samples, micro_batches)
    before, own, after = sum(sizes[:index]), sizes[index], sum(sizes[index + 1 :])
    return _split(nest, [size for size in (before, own, after) if size])[1 if before else 0]


def _split(value: Any, sizes: list[int], *, is_batch: bool = True, zipped: bool = False) -> list[Any]:
    """A value in pieces of these sizes; ``zipped``: it is a field as ``zip(*samples)`` makes it."""
    samples = sum(sizes)
    how = Read.ROWS if zipped else read(value, samples, is_batch=is_batch)
    if how is Read.OPAQUE:
        return [value] * len(sizes)
    if how is Read.ROWS:
        if (rows := rows_of(value)) is not None:
            return rows.split(value, sizes)
        ends = list(accumulate(sizes))
        return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if how is Read.FIELDS:
        handler = unpacker(value)
        assert handler is not None
        unpack, pack = handler
        zipped = is_batch and is_zipped(value, samples)
        columns = [_split(member, sizes, is_batch=False, zipped=zipped) for member in unpack(value)]
        return [pack(value, [column[index] for column in columns]) for index in range(len(sizes))]
    raise {Read.UNCLEAR: _unclear, Read.UNKNOWN: unknown}.get(how, _of_other_size)(value, samples)


# --- what can't be split ---


def _of_other_size(value: Any, samples: int) -> BatchError:
    if isinstance(value, list | tuple):
        return BatchError(
            f"a {type(value).__name__} of {len(value)} entries can't be split with a batch of {samples} "
            f"samples: it holds neither one entry per sample, nor fields of {samples} samples each."
        )
    rows = rows_of(value)
    assert rows is not None
    what = "its first dimension is" if isinstance(value, Tensor | np.ndarray) else "it holds"
    return BatchError(
        f"an entry {describe(value)} can't be split with a batch of {samples} samples: {what} "
        f"{rows.size(value)}. Make it {samples} long; what belongs to all samples goes into the "
        f"model or task, or into the batch as a plain value that is no tensor."
    )


def _unclear(value: Any, samples: int) -> BatchError:
    return BatchError(
        f"a {type(value).__name__} of {len(value)} entries in a batch of {samples} samples may hold one "
        f"entry per sample, or fields of {samples} samples each: {describe(value)}. Give a list (of dicts, "
        f"if it is the batch itself) for entries by sample, a dict or named tuple for fields."
    )


def unknown(value: Any, samples: int = 0) -> BatchError:
    """An error for what holds tensors where nobody can reach them."""
    name = type(value).__name__
    return BatchError(
        f"a {type(value).__module__}.{name} holds tensors, but mtaccum can't take that type apart. Say how: "
        f"mtaccum.register_split({name}, split, size) if it holds samples, or "
        f"mtaccum.register_structure({name}, unpack, pack) if it holds fields."
    )
