"""Windows: the micro-batches of one optimizer step, and what is known of their labels beforehand."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from mtaccum.batch import batch_size_of, split_batch
from mtaccum.errors import ConfigError, LabelError, TaskError
from mtaccum.model.tree import named_errors
from mtaccum.parallel.ranks import Ranks
from mtaccum.structure import describe
from mtaccum.tasks.base import Task

T = TypeVar("T")


def windows(loader: Iterable[T], group: int = 1) -> Iterator[list[T]]:
    """Lists of up to ``group`` consecutive batches; the last one holds what is left.

    The batch size is then ``group`` times the loader's. To keep the batch size and cut it into
    micro-batches instead, use ``split_batch``.
    """
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ConfigError(f"group must be a whole number of at least 1, got {group!r}.")

    def generate() -> Iterator[list[T]]:
        window: list[T] = []
        for batch in loader:
            window.append(batch)
            if len(window) == group:
                yield window
                window = []
        if window:
            yield window

    return generate()


@dataclass(frozen=True)
class WindowPlan:
    """How many labels each task has in each micro-batch of a window.

    Computed before the first forward, from the labels where they lie; the step itself then reads no
    tensor's values, so it never waits for a device.

    Attributes:
        counts: for each enabled task its count in each micro-batch.
        weights: for each enabled task its weight.
        parts: for each task that runs in chunks the counts of these, micro-batch by micro-batch.
        everywhere: for each enabled task its count in the window on all ranks together; None: there is one.
        ranks: how many ranks there are, over which gradients become their mean.
        union: for each micro-batch the tasks that any rank runs, where all ranks have to run these; None:
            each runs its own.
    """

    counts: Mapping[str, tuple[float, ...]]
    weights: Mapping[str, float]
    parts: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    everywhere: Mapping[str, float] | None = None
    ranks: int = 1
    union: tuple[tuple[str, ...], ...] | None = None

    @classmethod
    def of(
        cls, tasks: Mapping[str, Task], window: Sequence[Any], chunks: Mapping[str, int] | None = None
    ) -> WindowPlan:
        """Count the labels of the enabled ones of ``tasks``, and check their range.

        Args:
            chunks: for a task into how many parts it takes each micro-batch, if more than one.

        Raises:
            LabelError: a label out of its task's range; names task, value and range.
            TaskError: a count that is negative or not finite, or a ``count`` that failed.
        """
        enabled = {name: task for name, task in tasks.items() if task.enabled}
        raw = {name: [_count(name, task, batch) for batch in window] for name, task in enabled.items()}
        cut = {
            name: [[_count(name, enabled[name], p) for p in _chunks_of(name, batch, n)] for batch in window]
            for name, n in (chunks or {}).items()
            if name in enabled
        }
        ranges = {
            name: [
                task.label_range(batch) if task.label_limits and _may_be_positive(n) else None
                for n, batch in zip(raw[name], window, strict=True)
            ]
            for name, task in enabled.items()
        }
        numbers = [
            *_flat(raw.values()),
            *_flat(map(_flat, cut.values())),
            *_flat(map(_flat, ranges.values())),
        ]
        values = iter(_read(numbers))
        counts = {name: tuple(next(values) for _ in numbers) for name, numbers in raw.items()}
        parts = {
            name: tuple(tuple(next(values) for _ in numbers) for numbers in lists)
            for name, lists in cut.items()
        }
        for name, bounds in ranges.items():
            for index, bound in enumerate(bounds):
                if bound is not None:
                    _check_labels(name, enabled[name], next(values), next(values), index)
        for name, found in counts.items():
            if bad := [n for n in (*found, *_flat(parts.get(name, ()))) if not math.isfinite(n) or n < 0]:
                raise TaskError(f"task {name!r}: count() gave {bad[0]}; it must be finite and at least 0.")
        for name, lists in parts.items():
            for whole, of_parts in zip(counts[name], lists, strict=True):
                together = math.fsum(of_parts)
                if not math.isclose(whole, together, rel_tol=1e-6):
                    raise TaskError(
                        f"task {name!r}: count() gives {whole:g} for a micro-batch, but {together:g} for its "
                        f"chunks together. Let it count the labels of what it is given, or leave "
                        f"chunks.{name} away."
                    )
        return cls(counts, {name: task.weight for name, task in enabled.items()}, parts)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the window has; 0 if no task is enabled."""
        return len(next(iter(self.counts.values()), ()))

    def agreed(self, ranks: Ranks, *, together: bool = False) -> WindowPlan:
        """The plan with what the other ranks counted. To be called on all ranks, for each window.

        Args:
            together: whether all ranks have to run what any of them runs.

        Raises:
            ConfigError: the ranks train different tasks.
        """
        if ranks.size == 1:
            return self
        tasks = ", ".join(f"{name} (weight {weight})" for name, weight in self.weights.items())
        mark = float(zlib.crc32(tasks.encode()))
        largest, smallest = ranks.largest([mark, -mark])
        if largest != -smallest:
            given = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(ranks.gather(tasks)))
            raise ConfigError(f"all ranks must train the same tasks in the same order, but {given}.")
        totals = ranks.sums(list(self.local_totals.values()))
        union = None
        if together:
            theirs = ranks.gather([self.active(index) for index in range(self.micro_batches)])
            union = tuple(
                tuple(name for name in self.counts if any(name in (tasks or ()) for tasks in of_ranks))
                for of_ranks in zip_longest(*theirs)
            )
        everywhere = dict(zip(self.counts, totals, strict=True))
        return replace(self, everywhere=everywhere, ranks=ranks.size, union=union)

    @cached_property
    def local_totals(self) -> dict[str, float]:
        """For each enabled task its count in the window on this rank."""
        return {name: math.fsum(counts) for name, counts in self.counts.items()}

    @property
    def totals(self) -> Mapping[str, float]:
        """For each enabled task its count in the whole window; 0 if it is idle."""
        return self.local_totals if self.everywhere is None else self.everywhere

    def active(self, micro_batch: int) -> list[str]:
        """The tasks that have a label in this micro-batch."""
        if micro_batch >= self.micro_batches:  # one of other ranks only
            return []
        return [name for name, counts in self.counts.items() if counts[micro_batch] > 0]

    def running(self, micro_batch: int) -> list[str]:
        """The tasks that are run in this micro-batch: those with a label, on any rank if all go together."""
        if self.union is None:
            return self.active(micro_batch)
        return list(self.union[micro_batch]) if micro_batch < len(self.union) else []  # if no task is enabled

    def passes(self, tasks: Iterable[str]) -> int:
        """In how many micro-batches at least one of ``tasks`` has a label."""
        counts = [self.counts[name] for name in tasks if name in self.counts]
        return sum(1 for numbers in zip(*counts, strict=True) if any(n > 0 for n in numbers))

    def head_passes(self, task: str) -> int:
        """How often a task's head runs: once per micro-batch or chunk with a label."""
        return sum(n > 0 for n in (_flat(self.parts[task]) if task in self.parts else self.counts[task]))

    def scale(self, task: str, micro_batch: int, chunk: int | None = None) -> float:
        """Factor of a task's mean loss over a micro-batch, or over a chunk of one: weight * count / count in
        the window.

        Written so that K equal whole counts give exactly weight / K.
        """
        share = self.totals[task] / self.count(task, micro_batch, chunk)
        return self.ranks * self.weights[task] / share

    def count(self, task: str, micro_batch: int, chunk: int | None = None) -> float:
        """Number (or weight) of a task's labels in a micro-batch, or in a chunk of one."""
        if chunk is None:
            return self.counts[task][micro_batch]
        return self.parts[task][micro_batch][chunk]


def in_chunks(batch: Any, chunks: int) -> list[Any]:
    """A micro-batch in up to so many parts; one with fewer samples in as many as it has."""
    parts = min(chunks, batch_size_of(batch))
    return split_batch(batch, parts) if parts > 1 else [batch]


def _chunks_of(name: str, batch: Any, chunks: int) -> list[Any]:
    with named_errors(lambda: f"chunks of task {name!r}"):
        return in_chunks(batch, chunks)


def _count(name: str, task: Task, batch: Any) -> Any:
    try:
        count = task.count(batch)
        number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
        if not number or (isinstance(count, Tensor) and count.is_complex()):
            raise TypeError(f"it returned {describe(count)}; it must be a number or a 0-d tensor")
        return count
    except Exception as error:
        raise TaskError(f"task {name!r}: count() failed: {type(error).__name__}: {error}") from error


def _may_be_positive(count: Any) -> bool:
    """Whether there may be labels: a tensor's value isn't known yet."""
    return isinstance(count, Tensor) or count > 0


def _flat(lists: Iterable[Iterable[Any] | None]) -> list[Any]:
    return [item for sub in lists if sub is not None for item in sub]


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
