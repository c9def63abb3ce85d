"""Windows: the micro-batches between two optimizer steps, as a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from mtaccum.errors import ConfigError
from mtaccum.values import whole_number

T = TypeVar("T")


def windows(loader: Iterable[T], micro_batches: int = 1) -> Iterator[list[T]]:
    """Lists of up to ``micro_batches`` consecutive batches; the last one holds what is left.

    The batch size is then ``micro_batches`` times the loader's. To keep the batch size and split it into
    micro-batches instead, use ``split_batch``.
    """
    number = whole_number(micro_batches)
    if number is None or number < 1:
        raise ConfigError(f"micro_batches must be a whole number of at least 1, got {micro_batches!r}.")

    def generate() -> Iterator[list[T]]:
        window: list[T] = []
        for batch in loader:
            window.append(batch)
            if len(window) == number:
                yield window
                window = []
        if window:
            yield window

    return generate()
