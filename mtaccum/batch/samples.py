"""Samples of a batch: how many there are, and micro-batches of some of them.

A batch is a nest, and each value in it holds the samples in one of three ways:

- rows: one entry per sample, as tensors and arrays have along their first dimension;
- fields: entries of which each is a value in turn, as those of dicts, dataclasses and named tuples are;
- opaque: it belongs to all samples, as numbers, strings and all that holds no tensors do.

A list holds rows, and a tuple fields; but what can only be the other is taken for that, such as a tuple of
one dict per sample. A list that is itself the batch holds fields, as ``default_collate`` makes them, unless
its entries are objects (dicts, dataclasses, graphs). A tuple that may be either is refused, with how to say
it. Whatever asks for samples reads a batch through ``_read``, and so in this one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from enum import Enum
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from mtaccum.batch.rows import rows_of
from mtaccum.errors import BatchError
from mtaccum.structure import describe, hides_tensors, unpacker
from mtaccum.values import real_number, whole_number


class _Read(Enum):
    """How a value holds the samples of a batch of a given size."""

    ROWS = "one entry per sample"
    FIELDS = "entries that are values in turn"
    OPAQUE = "nothing of single samples"
    OTHER_SIZE = "another number of samples"
    UNCLEAR = "rows or fields"
    UNKNOWN = "tensors that can't be reached"


# --- how a value is read ---


def _read(value: Any, samples: int, *, is_batch: bool = False) -> _Read:
    """How a value holds ``samples`` samples; ``is_batch``: it is the batch itself, and no field of it."""
    if (rows := rows_of(value)) is not None:
        count = rows.size(value)
        if count is None:
            return _Read.OPAQUE
        return _Read.ROWS if count == samples else _Read.OTHER_SIZE
    if isinstance(value, list) or type(value) is tuple:
        return _read_batch(value, samples) if is_batch else _read_sequence(value, samples)
    if hides_tensors(value):
        return _Read.UNKNOWN
    return _Read.OPAQUE if unpacker(value) is None else _Read.FIELDS


def _read_sequence(value: Sequence[Any], samples: int) -> _Read:
    """A list or tuple that is a field."""
    as_fields, is_list = _fit(value, samples), isinstance(value, list)
    if len(value) != samples:
        # a list of plain values is one per sample, of another number of samples
        varies = bool(value) and all(map(_varies, value))
        return _Read.FIELDS if as_fields and (varies or not is_list) else _Read.OTHER_SIZE
    if not as_fields or samples == 1:
        return _Read.ROWS
    if _differ_in_kind(value):
        return _Read.FIELDS
    if is_list or all(map(_is_object, value)):
        return _Read.ROWS
    return _Read.FIELDS if all(entry is None for entry in value) else _Read.UNCLEAR


def _read_batch(value: Sequence[Any], samples: int) -> _Read:
    """A list or tuple that is the batch itself."""
    as_rows = _Read.ROWS if len(value) == samples else _Read.OTHER_SIZE
    if isinstance(value, list) and value and all(map(_is_object, value)):
        return as_rows
    as_fields = _fit(value, samples)
    if len(value) > 1 and not isinstance(value[0], list) and _are_alike(value):
        return _read_alike(value, samples) if as_fields else as_rows
    return _Read.FIELDS if as_fields or not all(map(_varies, value)) else as_rows


def _read_alike(batch: Sequence[Any], samples: int) -> _Read:
    """A batch of entries of which each may be a field, or a sample that nobody collated."""
    if isinstance(batch, list) and not all(_fit_without_opaque(entry, samples) for entry in batch):
        return _Read.ROWS if len(batch) == samples else _Read.OTHER_SIZE
    if type(batch[0]) is tuple and len(batch[0]) == samples != len(batch):
        return _Read.FIELDS  # zip(*samples), of fields that look alike
    return _Read.UNCLEAR


def _fit(entries: Sequence[Any], samples: int) -> bool:
    """Whether these can be fields of a batch of that size."""
    for entry in entries:
        how = _read(entry, samples)
        if how in (_Read.OTHER_SIZE, _Read.UNKNOWN):
            return False
        if how is _Read.FIELDS and not _fit(_members(entry), samples):
            return False
    return True


def _is_zipped(batch: Any, samples: int) -> bool:
    """Whether a batch is ``zip(*samples)``: tuples of one entry per sample, of which some can't be fields."""
    of_tuples = isinstance(batch, list | tuple) and all(type(entry) is tuple for entry in batch)
    if not of_tuples or any(len(entry) != samples for entry in batch):
        return False
    return any(_read(entry, samples) is _Read.ROWS for entry in batch)


def _fit_without_opaque(value: Any, samples: int) -> bool:
    """Whether a value is of that many samples throughout."""
    if (how := _read(value, samples)) is _Read.FIELDS:
        return all(_fit_without_opaque(member, samples) for member in _members(value))
    return how is _Read.ROWS


def _varies(entry: Any) -> bool:
    """Whether an entry holds rows, or fields."""
    return rows_of(entry) is not None or unpacker(entry) is not None


def _is_object(entry: Any) -> bool:
    """Whether a list of such entries holds one for each sample, whatever is in them."""
    if rows_of(entry) is not None or isinstance(entry, list) or type(entry) is tuple:
        return False
    return entry is not None and real_number(entry) is None


def _are_alike(entries: Sequence[Any]) -> bool:
    """Whether these are containers of one type, with the same fields of the same kinds."""
    return unpacker(entries[0]) is not None and len(set(map(_kind_of, entries))) == 1


def _kind_of(value: Any) -> Any:
    """What two samples of a data set have in common: types, keys, dimensions; sizes may differ."""
    if isinstance(value, Tensor | np.ndarray):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return type(value), tuple(sorted((str(key), _kind_of(member)) for key, member in value.items()))
    return type(value), tuple(map(_kind_of, _members(value)))


def _differ_in_kind(entries: Sequence[Any]) -> bool:
    """Whether these are tensors of different types or numbers of dimensions, and so not samples of one
    field."""
    if not all(isinstance(entry, Tensor | np.ndarray) for entry in entries):
        return False
    return len(set(map(_kind_of, entries))) > 1


def _members(value: Any) -> Sequence[Any]:
    handler = unpacker(value)
    return () if handler is None else handler[0](value)


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
        if (how := _read(batch, size, is_batch=True)) is _Read.UNCLEAR:
            raise _unclear(batch, size)
        if how is _Read.ROWS or (how is _Read.FIELDS and _fit(_members(batch), size)):
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
        of_objects, is_list = bool(value) and all(map(_is_object, value)), isinstance(value, list)
        if of_objects and (is_list or not is_batch):
            yield 0, len(value)
            return
        yield (4 if is_batch else 2 if is_list else 3), len(value)
        later = 4 if is_list and not is_batch else 0  # what is in a list's entries is each sample's own
    else:
        later = 0
    for member in _members(value):
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
    how = _Read.ROWS if zipped else _read(value, samples, is_batch=is_batch)
    if how is _Read.OPAQUE:
        return [value] * len(sizes)
    if how is _Read.ROWS:
        if (rows := rows_of(value)) is not None:
            return rows.split(value, sizes)
        ends = list(accumulate(sizes))
        return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if how is _Read.FIELDS:
        handler = unpacker(value)
        assert handler is not None
        unpack, pack = handler
        zipped = is_batch and _is_zipped(value, samples)
        columns = [_split(member, sizes, is_batch=False, zipped=zipped) for member in unpack(value)]
        return [pack(value, [column[index] for column in columns]) for index in range(len(sizes))]
    raise {_Read.UNCLEAR: _unclear, _Read.UNKNOWN: unknown}.get(how, _of_other_size)(value, samples)


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
