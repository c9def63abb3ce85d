"""Of many micro-batches that are alike a few are run, and stand for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mtaccum.engine import LabelCounts


def representatives(labels: LabelCounts, sizes: Sequence[int]) -> dict[int, float]:
    """The micro-batches that tell of all, three of each kind, with how many each stands for. The second finds
    the gradients of the first one, and the last those of all. The kind includes the size in samples."""
    of_kind: dict[Any, list[int]] = {}
    for index, size in enumerate(sizes):
        of_kind.setdefault((size, labels.active_in(index)), []).append(index)
    stands_for: dict[int, float] = {}
    for indices in of_kind.values():
        some = {*indices[:2], indices[-1]}
        stands_for |= {index: len(indices) / len(some) for index in some}
    return dict(sorted(stands_for.items()))


class NotingWindow(list[Any]):
    """A window that notes a number whenever one of its micro-batches begins."""

    def __init__(self, micro_batches: Sequence[Any], noted: Callable[[], int]) -> None:
        super().__init__(micro_batches)
        self._noted = noted

    def __iter__(self) -> Iterator[Any]:
        self._notes = []
        for micro_batch in super().__iter__():
            self._notes.append(self._noted())
            yield micro_batch

    def differences(self) -> list[int]:
        """By how much the number grew during each."""
        return [after - before for before, after in pairwise([*self._notes, self._noted()])]
