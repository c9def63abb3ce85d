"""Reading: how each value in a batch holds the samples.

A batch is a nest, and each value in it holds the samples in one of three ways:

- rows: one entry per sample, as tensors and arrays have along their first dimension;
- fields: entries of which each is a value in turn, as those of dicts, dataclasses and named tuples are;
- opaque: it belongs to all samples, as numbers, strings and all that holds no tensors do.

A list holds rows, and a tuple fields; but what can only be the other is taken for that, such as a tuple of
one dict per sample. A list that is itself the batch holds fields, as ``default_collate`` makes them, unless
its entries are objects (dicts, dataclasses, graphs). A tuple that may be either is refused, with how to say
it. Whatever asks for samples reads a batch through ``read``, and so in this one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

from mtaccum.batch.rows import rows_of
from mtaccum.structure import hides_tensors, unpacker
from mtaccum.values import real_number


class Read(Enum):
    """How a value holds the samples of a batch of a given size."""

    ROWS = "one entry per sample"
    FIELDS = "entries that are values in turn"
    OPAQUE = "nothing of single samples"
    OTHER_SIZE = "another number of samples"
    UNCLEAR = "rows or fields"
    UNKNOWN = "tensors that can't be reached"


def read(value: Any, samples: int, *, is_batch: bool = False) -> Read:
    """How a value holds ``samples`` samples; ``is_batch``: it is the batch itself, and no field of it."""
    if (rows := rows_of(value)) is not None:
        count = rows.size(value)
        if count is None:
            return Read.OPAQUE
        return Read.ROWS if count == samples else Read.OTHER_SIZE
    if isinstance(value, list) or type(value) is tuple:
        return _read_batch(value, samples) if is_batch else _read_sequence(value, samples)
    if hides_tensors(value):
        return Read.UNKNOWN
    return Read.OPAQUE if unpacker(value) is None else Read.FIELDS


def _read_sequence(value: Sequence[Any], samples: int) -> Read:
    """A list or tuple that is a field."""
    as_fields, is_list = fit(value, samples), isinstance(value, list)
    if len(value) != samples:
        # a list of plain values is one per sample, of another number of samples
        varies = bool(value) and all(map(_varies, value))
        return Read.FIELDS if as_fields and (varies or not is_list) else Read.OTHER_SIZE
    if not as_fields or samples == 1:
        return Read.ROWS
    if _differ_in_kind(value):
        return Read.FIELDS
    if is_list or all(map(is_object, value)):
        return Read.ROWS
    return Read.FIELDS if all(entry is None for entry in value) else Read.UNCLEAR


def _read_batch(value: Sequence[Any], samples: int) -> Read:
    """A list or tuple that is the batch itself."""
    as_rows = Read.ROWS if len(value) == samples else Read.OTHER_SIZE
    if isinstance(value, list) and value and all(map(is_object, value)):
        return as_rows
    as_fields = fit(value, samples)
    if len(value) > 1 and not isinstance(value[0], list) and _are_alike(value):
        return _read_alike(value, samples) if as_fields else as_rows
    return Read.FIELDS if as_fields or not all(map(_varies, value)) else as_rows


def _read_alike(batch: Sequence[Any], samples: int) -> Read:
    """A batch of entries of which each may be a field, or a sample that nobody collated."""
    if isinstance(batch, list) and not all(_fit_without_opaque(entry, samples) for entry in batch):
        return Read.ROWS if len(batch) == samples else Read.OTHER_SIZE
    if type(batch[0]) is tuple and len(batch[0]) == samples != len(batch):
        return Read.FIELDS  # zip(*samples), of fields that look alike
    return Read.UNCLEAR


def fit(entries: Sequence[Any], samples: int) -> bool:
    """Whether these can be fields of a batch of that size."""
    for entry in entries:
        how = read(entry, samples)
        if how in (Read.OTHER_SIZE, Read.UNKNOWN):
            return False
        if how is Read.FIELDS and not fit(members(entry), samples):
            return False
    return True


def is_zipped(batch: Any, samples: int) -> bool:
    """Whether a batch is ``zip(*samples)``: tuples of one entry per sample, of which some can't be fields."""
    of_tuples = isinstance(batch, list | tuple) and all(type(entry) is tuple for entry in batch)
    if not of_tuples or any(len(entry) != samples for entry in batch):
        return False
    return any(read(entry, samples) is Read.ROWS for entry in batch)


def _fit_without_opaque(value: Any, samples: int) -> bool:
    """Whether a value is of that many samples throughout."""
    if (how := read(value, samples)) is Read.FIELDS:
        return all(_fit_without_opaque(member, samples) for member in members(value))
    return how is Read.ROWS


def _varies(entry: Any) -> bool:
    """Whether an entry holds rows, or fields."""
    return rows_of(entry) is not None or unpacker(entry) is not None


def is_object(entry: Any) -> bool:
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
    return type(value), tuple(map(_kind_of, members(value)))


def _differ_in_kind(entries: Sequence[Any]) -> bool:
    """Whether these are tensors of different types or numbers of dimensions, and so not samples of one
    field."""
    if not all(isinstance(entry, Tensor | np.ndarray) for entry in entries):
        return False
    return len(set(map(_kind_of, entries))) > 1


def members(value: Any) -> Sequence[Any]:
    """What a value can be taken apart into; nothing for a leaf."""
    handler = unpacker(value)
    return () if handler is None else handler[0](value)
