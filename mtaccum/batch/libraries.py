"""Containers of other libraries that hold samples. They are known by name, so that none has to be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn.utils.rnn import pack_sequence, unpack_sequence


class Container(NamedTuple):
    """How a container of another library holds samples.

    Attributes:
        size: how many samples it holds; None where it has no axis of them.
        take: some of them, in a container of the same type.
    """

    size: Callable[[Any], int | None]
    take: Callable[[Any, slice], Any]


def container_of(value: Any) -> Container | None:
    """How a value of another library holds samples; None if its type isn't known."""
    cls = type(value)
    if cls not in _of_types:
        names = (f"{base.__module__.partition('.')[0]}.{base.__qualname__}" for base in cls.__mro__)
        _of_types[cls] = next((_CONTAINERS[name] for name in names if name in _CONTAINERS), None)
    return _of_types[cls]


def _graphs(batch: Any, rows: slice) -> Any:
    return type(batch).from_data_list(batch.to_data_list()[rows])


def _sequences(packed: Any, rows: slice) -> Any:
    return pack_sequence(unpack_sequence(packed)[rows], enforce_sorted=False)


def _tokens(encoding: Any, rows: slice) -> Any:
    taken = {key: value[rows] for key, value in encoding.items()}
    of_tokens = None if encoding.encodings is None else encoding.encodings[rows]
    return type(encoding)(taken, of_tokens, n_sequences=encoding.n_sequences)


_FRAME = Container(len, lambda frame, rows: frame.iloc[rows])
_CONTAINERS = {
    "pandas.DataFrame": _FRAME,
    "pandas.Series": _FRAME,
    "pandas.Index": Container(len, lambda index, rows: index[rows]),
    "tensordict.TensorDictBase": Container(
        lambda held: held.batch_size[0] if held.batch_size else None, lambda held, rows: held[rows]
    ),
    "torch_geometric.Batch": Container(lambda batch: batch.num_graphs, _graphs),
    "transformers.BatchEncoding": Container(
        lambda encoding: len(next(iter(encoding.values()))) if encoding else None, _tokens
    ),
    "torch.PackedSequence": Container(lambda packed: int(packed.batch_sizes[0]), _sequences),
}
_of_types: dict[type, Container | None] = {}  # found once for each: batches are read in every step
