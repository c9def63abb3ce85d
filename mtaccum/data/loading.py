"""Loading: which samples make a micro-batch, and errors that say what a data set of one's own may lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.utils.data import Sampler

from mtaccum.batch import split_sizes
from mtaccum.errors import BatchError, ConfigError

T = TypeVar("T")


class MicroBatchSampler(Sampler[list[int]]):
    """Index lists of micro-batches: each batch in ``accumulate`` parts that differ by at most one sample.

    Every sample comes once per epoch. The order depends on seed and epoch only, and not on
    ``accumulate``; so K changes memory, not the training. The last batch of an epoch may be smaller, and
    is cut into as few parts as keep to the size of the others. So ``windows(loader, accumulate)`` has one
    batch per window.

    With several ranks each takes its part of every ``ranks`` * ``batch_size`` samples, in the same order as
    one rank with a batch size of that would. In the last batch of an epoch parts may differ by one sample,
    and a rank may have none.

    Args:
        samples: length of the data set.
        batch_size: samples per optimizer step and rank.
        accumulate: micro-batches per batch.
        shuffle: a new order in every epoch, or that of the data set.
        seed: of the order.
        rank, ranks: which part of how many.

    Raises:
        ConfigError: a size below 1, or more micro-batches than samples in a batch or in the data set.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        accumulate: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if samples < 1:
            raise ConfigError(f"the data set has {samples} samples; training needs at least 1.")
        for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
            if value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value}.")
        if accumulate > min(batch_size, samples):
            what = "the batch" if batch_size <= samples else "the data set"
            raise ConfigError(
                f"accumulate={accumulate} asks for more micro-batches than {what} has samples "
                f"({min(batch_size, samples)}). Use accumulate={min(batch_size, samples)} or less."
            )
        self.samples, self.batch_size, self.accumulate = samples, batch_size, accumulate
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.ranks = rank, ranks
        self.epoch = 0
        self.first_sample = 0

    @property
    def batches(self) -> int:
        """Batches, and so optimizer steps, in an epoch."""
        return -(-self.samples // self.global_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step on all ranks together."""
        return self.batch_size * self.ranks

    def samples_from(self, first: int) -> int:
        """Samples, on all ranks together, of the batch that starts with the ``first`` one of an epoch."""
        return min(self.global_batch_size, self.samples - first)

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        """Let the next iteration be that of ``epoch``, without its first ``first_sample`` samples."""
        self.epoch, self.first_sample = epoch, first_sample

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.samples, generator=generator).tolist()
        for first in self._firsts():
            shares = self._shares(first)
            start = first + sum(shares[: self.rank])
            for size in self._sizes(shares[self.rank]):
                yield order[start : start + size]
                start += size

    def __len__(self) -> int:
        return sum(len(self._sizes(self._shares(first)[self.rank])) for first in self._firsts())

    def _firsts(self) -> range:
        """Where the batches of an epoch start that are left."""
        return range(self.first_sample, self.samples, self.global_batch_size)

    def _shares(self, first: int) -> list[int]:
        """Samples of a batch on each rank."""
        share, larger = divmod(self.samples_from(first), self.ranks)
        return [share + (rank < larger) for rank in range(self.ranks)]

    def _sizes(self, samples: int) -> list[int]:
        if samples == 0:
            return []
        largest = -(-self.batch_size // self.accumulate)
        parts = self.accumulate if samples == self.batch_size else -(-samples // largest)
        return split_sizes(samples, min(parts, samples))


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
