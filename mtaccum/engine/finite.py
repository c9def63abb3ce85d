"""Values that aren't finite: one flag per step, and a search for the place when it falls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from mtaccum.engine.result import LossLog
from mtaccum.engine.schedules import Backward
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import NonfiniteError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.fsdp import local
from mtaccum.parallel.ranks import ALONE, Ranks
from mtaccum.structure import describe, tensors_of
from mtaccum.tasks.base import Loss

_LOG = logging.getLogger("mtaccum")
REACTIONS = ("raise", "skip")
BAD_HOOK = "on_gradients left gradients that are not finite"


def all_finite(values: Sequence[Tensor]) -> bool:
    """Whether all 0-d tensors are finite; the only place in a step that waits for the device."""
    device = values[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no double
    flag = torch.stack([value.to(device, wide) for value in values]).isfinite().all()
    # a prediction of memory runs the step on tensors without values
    return isinstance(flag, FakeTensor) or bool(flag)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and nothing infinite; whole numbers always are."""
    values = local(tensor.detach())
    values = values.coalesce().values() if values.is_sparse else values
    return not (values.is_floating_point() or values.is_complex()) or bool(values.isfinite().all())


class Skips:
    """Counts the steps that were skipped since something in them was not finite.

    Args:
        reaction: ``raise`` or ``skip``.
        limit: so many in a row are an error whatever the reaction.
    """

    def __init__(self, reaction: str, limit: int) -> None:
        self.reaction, self.limit = reaction, limit
        self.total = self.in_a_row = 0

    def add(self) -> None:
        """One more."""
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


@dataclass
class Search:
    """Looks on while a window runs again, and notes the first value that isn't finite.

    Attributes:
        finding: what it is and where, in a sentence; None: nothing found.
        backwards: how many there were before the finding.
        in_gradient: whether it was found in a gradient, rather than in a loss.
    """

    model: MultiTaskModel
    finding: str | None = None
    backwards: int = 0
    in_gradient: bool = False
    _outputs: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which nodes hand on values that aren't finite."""
        hooks = [
            self.model.node(name).register_forward_hook(self._looking_at(name))
            for name in self.model.own_modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _looking_at(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            if bad := [t for t in tensors_of(output, strict=False) if not is_finite(t)]:
                self._outputs.append((name, describe(bad[0])))

        return look

    def loss(self, task: str, micro_batch: int, of: int, batch: Any, value: Tensor) -> None:
        """Look at a task's loss; with what made it, if that wasn't finite."""
        outputs, self._outputs = self._outputs, []
        if self.finding is None and not is_finite(value):
            self.finding = (
                f"the loss of task {task!r} is {value.item()} in micro-batch {micro_batch} of {of}: "
                f"{self._cause(batch, outputs)}"
            )

    def _cause(self, batch: Any, outputs: Sequence[tuple[str, str]]) -> str:
        if not all(map(is_finite, tensors_of(self.model.inputs(batch), strict=False))):
            return "the inputs in the batch hold NaN or inf"
        if not outputs:
            return (
                "the prediction is finite: look for log, sqrt or a division in the loss, and for labels that "
                "are NaN"
            )
        node, shape = outputs[0]
        for name, parameter in self.model.node(node).named_parameters():
            if not is_finite(parameter):
                return (
                    f"the parameter {self.model.prefix(node)}{name} holds NaN or inf itself, before the step"
                )
        what = "prediction" if node in self.model.tasks else "features"
        return f"the {what} of {node!r} ({shape}) hold NaN or inf already"

    def gradients(self, task: str, micro_batch: int, of: int) -> None:
        """Look at the gradients after a task's backward."""
        self._outputs = []
        if self.finding is None:
            bad = [
                n for n, p in self.model.named_parameters() if p.grad is not None and not is_finite(p.grad)
            ]
            self.in_gradient = bool(bad)
            self.backwards += not bad
            if bad:
                at = min(bad, key=lambda name: not name.startswith(f"tasks.{task}."))
                self.finding = (
                    f"the gradient of task {task!r} is not finite in micro-batch {micro_batch} of {of}, but "
                    f"its loss is (seen at {at}): look for sqrt, norm or log at 0, and for values that are "
                    f"masked after the arithmetic instead of before (torch.where on the inputs)"
                )


class SearchingLog(LossLog):
    """Tells a search of each loss, and of each backward which task's it was."""

    searches = True

    def __init__(self, plan: WindowPlan, search: Search, window: Sequence[Any]) -> None:
        super().__init__(plan)
        self._search, self._window = search, window
        self._of = len(window) if plan.union is None else len(plan.union)
        self._task, self._micro_batch = "", 0

    def add(self, task: str, micro_batch: int, loss: Loss, total: Tensor, chunk: int | None = None) -> None:
        super().add(task, micro_batch, loss, total, chunk)
        self._task, self._micro_batch = task, micro_batch
        self._search.loss(task, micro_batch, self._of, self._window[micro_batch], total)

    def stands_in(self, task: str, micro_batch: int) -> None:
        self._task, self._micro_batch = task, micro_batch

    def looking(self, backward: Backward) -> Backward:
        """``backward``, and then a look at the gradients."""

        def run(loss: Tensor) -> None:
            backward(loss)
            self._search.gradients(self._task, self._micro_batch, self._of)

        return run


def describe_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks = ALONE) -> str:
    """What is wrong with the gradients of a step, before they are dropped."""
    bad = not all(is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)
    if not any(ranks.largest([float(bad)])):  # of what is spread each rank sees a part
        return "the gradients are finite, but so large that their norm is not"
    return "a loss or gradient is not finite, but was when the window ran again"
