"""What is checked: a model, real batches, and the options of the steps. Each run gets copies of its own, in
double precision if they can be."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.batch import batch_size_of, to_device
from mtaccum.engine import Engine, LabelCounts, StepOptions
from mtaccum.engine.norms import normalising
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.model import MultiTaskModel
from mtaccum.parallel import SingleProcess
from mtaccum.state import RandomState
from mtaccum.structure import map_tensors
from mtaccum.torch_internals import buffers_of, parameters_of

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
        """Copies of the micro-batches; whole numbers stay as they are."""

        def fresh(tensor: Tensor) -> Tensor:
            wide = _WIDE.get(tensor.dtype, tensor.dtype) if self.double else tensor.dtype
            return tensor.detach().to(wide, copy=True)  # a forward may write into its input

        return [map_tensors(to_device(batch, self.device), fresh, strict=False) for batch in self.window]

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


_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def copy_of(model: MultiTaskModel, device: torch.device, *, double: bool) -> MultiTaskModel:
    """A copy on a device, with everything that has a fraction in double precision if asked for.

    Not by ``model.double()``: buffers that modules share would be shared no more, and tensors that are
    neither parameters nor buffers would stay in single precision.
    """
    # old-style weight and spectral norm leave a tensor with a graph in an attribute, which can't be copied
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    copied = copy.deepcopy(model, memo)
    copied.zero_grad(set_to_none=True)
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            wide = _WIDE.get(tensor.dtype, tensor.dtype) if double else tensor.dtype
            moved[id(tensor)] = (tensor, tensor.detach().to(device, wide))
        return moved[id(tensor)][1]

    for module in copied.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None:
                parameter.data = move(parameter)
        for places in (buffers_of(module), vars(module)):
            for name, value in places.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    places[name] = move(value)
    return copied
