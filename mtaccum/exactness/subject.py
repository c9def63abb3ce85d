"""What is checked: a model, real batches, and the options of the steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mtaccum.batch import batch_size_of
from mtaccum.engine import Engine, LabelCounts, StepOptions
from mtaccum.engine.norms import normalising
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.exactness.doubles import copies_of, copy_of
from mtaccum.model import MultiTaskModel
from mtaccum.parallel import SingleProcess
from mtaccum.state import RandomState

DOUBLE_BOUND, SINGLE_BOUND = 1e-12, 1e-5


@dataclass
class Subject:
    """The user's model and window, of which each of the runs of a check gets fresh copies.

    Attributes:
        options: those that are compared; the others have their defaults.
        random: the state that each run starts from.
        drawing: the tasks in chunks whose heads draw random numbers.
        double: whether copies are in double precision.
        bound: what a gradient may differ by, relative to its node's norm.
    """

    model: MultiTaskModel
    window: Sequence[Any]
    device: torch.device
    options: StepOptions
    random: RandomState
    drawing: frozenset[str] = frozenset()
    double: bool = True
    bound: float = DOUBLE_BOUND

    @cached_property
    def labels(self) -> LabelCounts:
        """Counts of the window."""
        return LabelCounts.of(self.model.tasks_by_name(), self.window)

    @cached_property
    def counts(self) -> WindowCounts:
        """The same with the weights of the tasks, in this process."""
        return WindowCounts.agreed(self.labels, self.model, SingleProcess())

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
        return {name for name, total in self.labels.totals.items() if total > 0}

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
            if missing & set(self.labels.active_in(index)):
                chosen.append(index)
                missing = missing - set(self.labels.active_in(index))
        return chosen

    def fresh_model(self) -> MultiTaskModel:
        """A copy of the model, and the random state as it was at the start."""
        self.random.restore()
        return copy_of(self.model, self.device, double=self.double)

    def comparable_model(self) -> MultiTaskModel:
        """A copy on which a schedule and the joint backward draw the same random numbers."""
        model = self.fresh_model()
        for name in self.drawing:
            model.task(name).eval()
        return model

    def fresh_window(self) -> list[Any]:
        """Copies of the micro-batches."""
        return copies_of(self.window, self.device, double=self.double)

    def engine(self, model: MultiTaskModel) -> Engine:
        """An engine as it was asked for. A check is this process's own, whatever others do."""
        return Engine(model, options=self.options, parallel="none")

    @contextmanager
    def running(self, model: MultiTaskModel) -> Iterator[None]:
        """Around forwards of a copy without an engine: BatchNorm as an engine would have it, no warnings."""
        with (
            warnings.catch_warnings(action="ignore"),
            normalising(model, self.options.batchnorm, self.counts.passes(model)),
        ):
            yield
