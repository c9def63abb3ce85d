"""Of many micro-batches that are alike a few are run, and stand for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mtaccum.engine import WindowPlan


def shortened(plan: WindowPlan, sizes: Sequence[int]) -> tuple[WindowPlan, dict[int, float]]:
    """The micro-batches that tell of all, three of each kind, with how many each stands for; and the plan of
    these. The second finds the gradients of the first one, and the last those of all."""
    of_kind: dict[Any, list[int]] = {}
    for index, size in enumerate(sizes):
        of_kind.setdefault((size, tuple(plan.active(index))), []).append(index)
    stands_for: dict[int, float] = {}
    for indices in of_kind.values():
        some = {*indices[:2], indices[-1]}
        stands_for |= {index: len(indices) / len(some) for index in some}
    chosen = dict(sorted(stands_for.items()))
    counts = {name: tuple(numbers[i] for i in chosen) for name, numbers in plan.counts.items()}
    parts = {name: tuple(lists[i] for i in chosen) for name, lists in plan.parts.items()}
    return WindowPlan(counts, plan.weights, parts), chosen


class Noting(list[Any]):
    """A window that notes a number whenever one of its micro-batches begins."""

    def __init__(self, parts: Sequence[Any], noted: Callable[[], int]) -> None:
        super().__init__(parts)
        self._noted = noted

    def __iter__(self) -> Iterator[Any]:
        self._notes = []
        for micro_batch in super().__iter__():
            self._notes.append(self._noted())
            yield micro_batch

    def differences(self) -> list[int]:
        """By how much the number grew during each."""
        return [after - before for before, after in pairwise([*self._notes, self._noted()])]
