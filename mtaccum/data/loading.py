"""Loading batches, with errors that say what a data set of one's own may lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mtaccum.errors import BatchError

T = TypeVar("T")


def loaded(loader: Iterable[T]) -> Iterator[T]:
    """The batches of a loader.

    Raises:
        BatchError: a sample couldn't be loaded, or samples don't fit into one batch.
    """
    batches = iter(loader)
    while True:
        with batch_errors():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


@contextmanager
def batch_errors() -> Iterator[None]:
    """What goes wrong while samples are loaded and put into a batch becomes an explained BatchError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BatchError(
            f"loading a batch failed: {type(error).__name__}: {reason}. The samples of a batch need the same "
            f"entries: where there is no label use NaN (regression), 255 (segmentation) or -100 "
            f"(classification), or give data.collate_fn."
        ) from error
