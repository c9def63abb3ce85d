"""What is checked: a model, real batches, and how they are to be run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mtaccum.batch import batch_size_of
from mtaccum.engine import Engine, WindowPlan
from mtaccum.engine.arrangement import Arrangement
from mtaccum.engine.norms import normalising, passes_of
from mtaccum.engine.replay import RandomState
from mtaccum.exactness.doubles import copies_of, copy_of
from mtaccum.model import MultiTaskModel

DOUBLE_BOUND, SINGLE_BOUND = 1e-12, 1e-5
_EACH_HEAD = Arrangement()


@dataclass
class Subject:
    """The user's model and window, of which each part of a check gets fresh copies.

    Attributes:
        random: the state that each run starts from.
        groups, chunks: as they were asked for.
        arrangement: what the engine made of them.
        drawing: the tasks in chunks whose heads draw random numbers.
        double: whether copies are in double precision.
        bound: what a gradient may differ by, relative to its node's norm.
    """

    model: MultiTaskModel
    window: Sequence[Any]
    device: torch.device
    schedule: str
    recompute: tuple[str, ...]
    batchnorm: str
    random: RandomState
    groups: Sequence[Sequence[str]] = ()
    chunks: Mapping[str, int] | None = None
    arrangement: Arrangement = _EACH_HEAD
    drawing: frozenset[str] = frozenset()
    double: bool = True
    bound: float = DOUBLE_BOUND

    @cached_property
    def plan(self) -> WindowPlan:
        """Counts of the window."""
        return WindowPlan.of(self.model.tasks_by_name(), self.window)

    @property
    def micro_batches(self) -> int:
        """K."""
        return len(self.window)

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [batch_size_of(batch) for batch in self.window]

    @property
    def reached(self) -> set[str]:
        """Tasks that have a label in the window."""
        return {name for name, total in self.plan.totals.items() if total > 0}

    @property
    def reached_nodes(self) -> list[str]:
        """Nodes that run."""
        return [n for n in self.model.own_modules() if set(self.model.tasks_below(n)) & self.reached]

    @property
    def telling(self) -> list[int]:
        """Micro-batches that together have labels of all tasks; mostly the first one alone."""
        chosen: list[int] = []
        missing = self.reached
        for index in range(self.micro_batches):
            if missing & set(self.plan.active(index)):
                chosen.append(index)
                missing = missing - set(self.plan.active(index))
        return chosen

    def twin(self) -> MultiTaskModel:
        """A fresh copy of the model, and the random state as it was at the start."""
        self.random.restore()
        return copy_of(self.model, self.device, double=self.double)

    def comparable_twin(self) -> MultiTaskModel:
        """A copy on which a schedule and the joint backward draw the same random numbers."""
        twin = self.twin()
        for name in self.drawing:
            twin.task(name).eval()
        return twin

    def batches(self) -> list[Any]:
        """Fresh copies of the micro-batches."""
        return copies_of(self.window, self.device, double=self.double)

    def engine(self, twin: MultiTaskModel) -> Engine:
        """An engine as it was asked for."""
        return Engine(
            twin,
            schedule=self.schedule,
            recompute=self.recompute,
            batchnorm=self.batchnorm,
            groups=self.groups,
            chunks=self.chunks,
        )

    @contextmanager
    def running(self, twin: MultiTaskModel) -> Iterator[None]:
        """Around forwards of a twin without an engine: BatchNorm as an engine would have it, no warnings."""
        with quiet(), normalising(twin, self.batchnorm, passes_of(twin, self.plan)):
            yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings: what is worth saying becomes a finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
