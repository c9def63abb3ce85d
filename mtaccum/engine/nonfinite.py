"""Values that aren't finite: one flag per step, and a search for the place when it falls.

The search runs the window once more, task by task, and looks at each loss and at the gradients after each
backward, up to the first value that is NaN or infinite.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.engine.result import LossLog
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import NonfiniteError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.observe import BACKWARD, observed, observing
from mtaccum.parallel import Ranks
from mtaccum.structure import describe, tensors_of
from mtaccum.tasks.base import Loss

_LOG = logging.getLogger("mtaccum")
BAD_HOOK = "on_gradients left gradients that are not finite"


def all_finite(values: Sequence[Tensor]) -> bool:
    """Whether all 0-d tensors are finite; the only place in a step that waits for the device."""
    device = values[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no double
    flag = torch.stack([value.to(device, wide) for value in values]).isfinite().all()
    return _assumed.get() or bool(flag)


_assumed = ContextVar("all values are finite", default=False)


@contextmanager
def assuming_finite() -> Iterator[None]:
    """Around steps on tensors without values, of which a prediction wants to know the memory."""
    token = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(token)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and nothing infinite; whole numbers always are."""
    values = tensor.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return not (values.is_floating_point() or values.is_complex()) or bool(values.isfinite().all())


def describe_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> str:
    """What is wrong with the gradients of a step, before they are dropped."""
    bad = not all(is_finite(ranks.local(p.grad)) for p in parameters if p.grad is not None)
    if not ranks.any(bad):
        return "the gradients are finite, but so large that their norm is not"
    return "a loss or gradient is not finite, but was when the window ran again"


class SkippedSteps:
    """Counts the steps that were skipped since something in them was not finite; ``limit`` of them in a row
    are an error, whatever the reaction (``raise`` or ``skip``)."""

    def __init__(self, reaction: str, limit: int) -> None:
        self.reaction, self.limit = reaction, limit
        self.total = self.in_a_row = 0

    def add(self) -> None:
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1

    @property
    def exhausted(self) -> bool:
        """Whether the limit is reached."""
        return self.in_a_row >= self.limit

    def report(self, step: int, finding: str, *, expected: bool) -> None:
        """Log a skipped step, or raise.

        Args:
            expected: it belongs to how a scaler finds its factor.

        Raises:
            NonfiniteError: the reaction is ``raise``, or the limit is reached.
        """
        if self.exhausted:
            raise NonfiniteError(
                f"step {step}: {finding}. This is the {self.in_a_row}. skipped step in a row."
            )
        if self.reaction == "raise" and not expected:
            raise NonfiniteError(
                f"step {step}: {finding}. Nothing was changed; on_nonfinite='skip' leaves such steps out."
            )
        _LOG.log(logging.INFO if expected else logging.WARNING, "skipped step %d: %s", step, finding)


class NonfiniteSearch(LossLog):
    """Looks on while a window runs again, and notes the first value that isn't finite.

    It is told each loss as the log of the window, and of each backward as an observer of its stages.

    Attributes:
        finding: what it is and where, in a sentence; None: nothing found.
        backwards: how many there were before the finding.
        in_gradient: whether it was found in a gradient, rather than in a loss.
    """

    def __init__(
        self, model: MultiTaskModel, counts: WindowCounts, ranks: Ranks, window: Sequence[Any]
    ) -> None:
        super().__init__(counts)
        self._model, self._ranks, self._window = model, ranks, window
        self._micro_batches = len(counts.running)
        self._outputs: list[tuple[str, str]] = []  # of nodes that handed on such values, since the last loss
        self.finding: str | None = None
        self.backwards = 0
        self.in_gradient = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around the second run."""
        nodes = {self._model.node(name): name for name in self._model.own_modules()}
        with observed(nodes, left=self._node_ran), observing(self):
            yield

    def _node_ran(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if bad := [t for t in tensors_of(output, strict=False) if not is_finite(t)]:
            self._outputs.append((name, describe(bad[0])))

    def add(self, task: str, loss: Loss, total: Tensor, chunk: int | None = None) -> None:
        super().add(task, loss, total, chunk)
        outputs, self._outputs = self._outputs, []
        if self.finding is None and not is_finite(total):
            self.finding = (
                f"the loss of task {task!r} is {total.item()} in micro-batch {self.micro_batch} of "
                f"{self._micro_batches}: {self._cause(self._window[self.micro_batch], outputs)}"
            )

    def begins(self, node: str, phase: str) -> None:
        """A stage begins; nothing is known yet."""

    def cut(self, leaves: Sequence[Tensor]) -> None:
        """There is none where each task runs its whole path."""

    def ends(self, node: str, phase: str) -> None:
        """Look at the gradients after a task's backward."""
        if phase != BACKWARD:
            return
        self._outputs = []
        if self.finding is not None:
            return
        gradients = ((name, p.grad) for name, p in self._model.named_parameters())
        bad = [n for n, grad in gradients if grad is not None and not is_finite(self._ranks.local(grad))]
        self.in_gradient = bool(bad)
        self.backwards += not bad
        if bad:
            at = min(bad, key=lambda name: not name.startswith(f"tasks.{node}."))
            self.finding = (
                f"the gradient of task {node!r} is not finite in micro-batch {self.micro_batch} of "
                f"{self._micro_batches}, but its loss is (seen at {at}): look for sqrt, norm or log at 0, "
                f"and for values that are masked after the arithmetic instead of before (torch.where on the "
                f"inputs)"
            )

    def _cause(self, batch: Any, outputs: Sequence[tuple[str, str]]) -> str:
        if not all(map(is_finite, tensors_of(self._model.inputs(batch), strict=False))):
            return "the inputs in the batch hold NaN or inf"
        if not outputs:
            return (
                "the prediction is finite: look for log, sqrt or a division in the loss, and for labels that "
                "are NaN"
            )
        node, shape = outputs[0]
        for name, parameter in self._model.node(node).named_parameters():
            if not is_finite(self._ranks.local(parameter)):
                return (
                    f"the parameter {self._model.prefix(node)}{name} holds NaN or inf itself, before the step"
                )
        what = "prediction" if node in self._model.tasks else "features"
        return f"the {what} of {node!r} ({shape}) hold NaN or inf already"
