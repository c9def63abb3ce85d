"""Label counts: how many labels each task has in each micro-batch, known before a window's first forward.

Three steps, each by itself: the tasks count, the values are read in one transfer, what was read is checked.
Counting knows nothing of weights or of other processes, so counts of a window hold for every step on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtaccum.batch import batch_size_of, own_view, split_batch
from mtaccum.errors import LabelError, TaskError
from mtaccum.model.tree import named_errors
from mtaccum.structure import describe
from mtaccum.tasks.base import Task
from mtaccum.values import real_number


@dataclass(frozen=True)
class LabelCounts:
    """How many labels each task has in each micro-batch of a window, on this process.

    The step itself reads no tensor's values, so it never waits for a device.

    Attributes:
        counts: for each enabled task its count in each micro-batch.
        chunk_counts: for each task that runs in chunks the counts of these, micro-batch by micro-batch.
    """

    counts: Mapping[str, tuple[float, ...]]
    chunk_counts: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tasks: Mapping[str, Task], window: Sequence[Any], chunks: Mapping[str, int] | None = None
    ) -> LabelCounts:
        """Count the labels of the enabled ones of ``tasks``, and check their range.

        Args:
            chunks: for a task into how many chunks its head takes each micro-batch, if more than one.

        Raises:
            LabelError: a label out of its task's range; names task, value and range.
            TaskError: a count that is negative or not finite, or a ``count`` that failed.
        """
        enabled = {name: task for name, task in tasks.items() if task.enabled}
        chunks = {name: number for name, number in (chunks or {}).items() if name in enabled}
        found = _count_all(enabled, window, chunks)
        values = iter(_read(found.numbers()))
        counts = {name: tuple(next(values) for _ in numbers) for name, numbers in found.counts.items()}
        chunk_counts = {
            name: tuple(tuple(next(values) for _ in numbers) for numbers in lists)
            for name, lists in found.chunk_counts.items()
        }
        for name, bounds in found.ranges.items():
            for index, bound in enumerate(bounds):
                if bound is not None:
                    _check_labels(name, enabled[name], next(values), next(values), index)
        for name, numbers in counts.items():
            _check_counts(name, numbers, chunk_counts.get(name))
        return cls(counts, chunk_counts)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the window has; 0 if no task is enabled."""
        return len(next(iter(self.counts.values()), ()))

    @cached_property
    def totals(self) -> dict[str, float]:
        """For each enabled task its count in the window; 0 if it is idle."""
        return {name: math.fsum(counts) for name, counts in self.counts.items()}

    @cached_property
    def active(self) -> tuple[tuple[str, ...], ...]:
        """For each micro-batch the tasks that have a label in it."""
        return tuple(
            tuple(name for name, counts in self.counts.items() if counts[index] > 0)
            for index in range(self.micro_batches)
        )

    def active_in(self, micro_batch: int) -> tuple[str, ...]:
        """The tasks that have a label in a micro-batch; none in one that only other ranks have."""
        return self.active[micro_batch] if micro_batch < self.micro_batches else ()

    def passes(self, tasks: Iterable[str]) -> int:
        """In how many micro-batches at least one of ``tasks`` has a label."""
        counts = [self.counts[name] for name in tasks if name in self.counts]
        return sum(1 for numbers in zip(*counts, strict=True) if any(n > 0 for n in numbers))

    def head_passes(self, task: str) -> int:
        """How often a task's head runs: once per micro-batch or chunk with a label."""
        numbers = _flat(self.chunk_counts[task]) if task in self.chunk_counts else self.counts[task]
        return sum(n > 0 for n in numbers)

    def count(self, task: str, micro_batch: int, chunk: int | None = None) -> float:
        """Number (or weight) of a task's labels in a micro-batch, or in a chunk of one."""
        if chunk is None:
            return self.counts[task][micro_batch]
        return self.chunk_counts[task][micro_batch][chunk]

    def take(self, indices: Iterable[int]) -> LabelCounts:
        """The counts of some of the micro-batches."""
        indices = list(indices)
        return LabelCounts(
            {name: tuple(numbers[i] for i in indices) for name, numbers in self.counts.items()},
            {name: tuple(lists[i] for i in indices) for name, lists in self.chunk_counts.items()},
        )


def in_chunks(batch: Any, chunks: int) -> list[Any]:
    """A micro-batch in up to so many chunks; one with fewer samples in as many as it has."""
    number = min(chunks, batch_size_of(batch))
    return split_batch(batch, number) if number > 1 else [batch]


# --- counting: numbers, or tensors whose values aren't known yet ---


@dataclass(frozen=True)
class _Found:
    """What the tasks say of a window: counts, counts of chunks, and smallest and largest labels."""

    counts: Mapping[str, Sequence[Any]]
    chunk_counts: Mapping[str, Sequence[Sequence[Any]]]
    ranges: Mapping[str, Sequence[tuple[Tensor, Tensor] | None]]

    def numbers(self) -> list[Any]:
        """All of them in a row."""
        return [
            *_flat(self.counts.values()),
            *_flat(map(_flat, self.chunk_counts.values())),
            *_flat(map(_flat, self.ranges.values())),
        ]


def _count_all(tasks: Mapping[str, Task], window: Sequence[Any], chunks: Mapping[str, int]) -> _Found:
    counts = {name: [_count(name, task, batch) for batch in window] for name, task in tasks.items()}
    chunk_counts = {
        name: [[_count(name, tasks[name], c) for c in _chunks_of(name, batch, n)] for batch in window]
        for name, n in chunks.items()
    }
    ranges = {
        name: [
            # there may be labels where the count is a tensor, whose value isn't known yet
            task.label_range(own_view(batch))
            if task.label_limits and (isinstance(n, Tensor) or n > 0)
            else None
            for n, batch in zip(counts[name], window, strict=True)
        ]
        for name, task in tasks.items()
    }
    return _Found(counts, chunk_counts, ranges)


def _count(name: str, task: Task, batch: Any) -> Any:
    try:
        count = task.count(own_view(batch))
        number = count.numel() == 1 if isinstance(count, Tensor) else real_number(count) is not None
        if not number or (isinstance(count, Tensor) and count.is_complex()):
            raise TypeError(f"it returned {describe(count)}; it must be a number or a 0-d tensor")
        return count
    except Exception as error:
        raise TaskError(f"task {name!r}: count() failed: {type(error).__name__}: {error}") from error


def _chunks_of(name: str, batch: Any, chunks: int) -> list[Any]:
    with named_errors(lambda: f"chunks of task {name!r}"):
        return in_chunks(batch, chunks)


def _flat(lists: Iterable[Iterable[Any] | None]) -> list[Any]:
    return [item for sub in lists if sub is not None for item in sub]


# --- reading ---


def _read(numbers: Sequence[Any]) -> list[float]:
    """Plain numbers and 0-d tensors as floats, with one transfer per device whatever their number."""
    found = [float("nan") if isinstance(number, Tensor) else float(number) for number in numbers]
    by_device: dict[torch.device, list[int]] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            by_device.setdefault(number.device, []).append(index)
    for device, indices in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no double
        stacked = torch.stack([numbers[i].detach().to(wide).reshape(()) for i in indices])
        for index, value in zip(indices, stacked.tolist(), strict=True):
            found[index] = value
    return found


# --- checking ---


def _check_labels(name: str, task: Task, low: float, high: float, micro_batch: int) -> None:
    assert task.label_limits is not None
    smallest, largest = task.label_limits
    if low < smallest or high > largest:
        value = low if low < smallest else high
        ignore = getattr(task, "ignore_index", None)
        ignored = "" if ignore is None else f", or {ignore} for a label that doesn't count"
        raise LabelError(
            f"task {name!r}: label {value:g} in micro-batch {micro_batch} is out of range; valid are "
            f"{smallest:g} to {largest:g}{ignored}. Check the target {task.target!r} or num_classes."
        )


def _check_counts(name: str, counts: Sequence[float], chunk_counts: Sequence[Sequence[float]] | None) -> None:
    if bad := [n for n in (*counts, *_flat(chunk_counts or ())) if not math.isfinite(n) or n < 0]:
        raise TaskError(f"task {name!r}: count() gave {bad[0]}; it must be finite and at least 0.")
    for whole, of_chunks in zip(counts, chunk_counts or (), strict=chunk_counts is not None):
        together = math.fsum(of_chunks)
        if not math.isclose(whole, together, rel_tol=1e-6):
            raise TaskError(
                f"task {name!r}: count() gives {whole:g} for a micro-batch, but {together:g} for its "
                f"chunks together. Let it count the labels of what it is given, or leave "
                f"chunks.{name} out."
            )
