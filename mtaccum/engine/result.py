"""What a step reports: the losses of a window, gathered while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import TaskError
from mtaccum.parallel import Ranks
from mtaccum.structure import describe
from mtaccum.tasks.base import Loss
from mtaccum.values import real_number


@dataclass(frozen=True)
class StepResult:
    """What happened in one window. Holds no graph; tensors stay on the model's device.

    Attributes:
        losses: for each task that was run, the mean loss over the window's valid labels (0-d, detached).
        loss_terms: the same for each named term of a loss that is a dict, by ``task/term``.
        counts: for each enabled task the number (or weight) of its valid labels in the window.
        idle: why an enabled task was not run in this window: ``{"depth": "no labels"}``.
        micro_batches: how many micro-batches the window had.
        grad_norm: norm of all gradients together before clipping (0-d); None without a step.
        stepped: whether the optimizer stepped. A window without any label is no step.
        nonfinite: what was not finite, where the step was skipped for that.
    """

    losses: Mapping[str, Tensor]
    loss_terms: Mapping[str, Tensor]
    counts: Mapping[str, float]
    idle: Mapping[str, str]
    micro_batches: int
    grad_norm: Tensor | None = None
    stepped: bool = False
    nonfinite: str | None = None


class LossLog:
    """Adds up each task's loss over a window, without a graph and without waiting for the device."""

    def __init__(self, counts: WindowCounts) -> None:
        self._counts = counts
        self.micro_batch = 0  # index of the one that runs
        self._sums: dict[str, tuple[Tensor, torch.dtype]] = {}

    def add(self, task: str, loss: Loss, total: Tensor, chunk: int | None = None) -> None:
        """Note the loss of the micro-batch that runs, or of a chunk of it: the mean over its labels, as
        ``Task.loss`` returned it, and the sum of its terms."""
        count = self._counts.labels.count(task, self.micro_batch, chunk)
        self._add(task, total, count)
        if isinstance(loss, Mapping):
            for term, value in loss.items():
                self._add(f"{task}/{term}", sum_of_terms(value), count)

    def _add(self, name: str, value: Tensor, count: float) -> None:
        # in double, so that the mean of K equal losses is that loss again
        wide = torch.float32 if value.device.type == "mps" else torch.float64
        weighted = value.detach().to(wide) * count
        self._sums[name] = (self._sums[name][0] + weighted if name in self._sums else weighted), value.dtype

    def result(self, ranks: Ranks, device: torch.device) -> StepResult:
        """The means over the window, on all ranks together."""
        totals = self._counts.totals
        sums = ranks.sum_losses(self._sums, device)
        means = {
            name: (value / totals[name.split("/")[0]]).to(dtype) for name, (value, dtype) in sums.items()
        }
        return StepResult(
            losses={name: mean for name, mean in means.items() if name in totals},
            loss_terms={name: mean for name, mean in means.items() if name not in totals},
            counts=totals,
            idle={name: "no labels" for name, total in totals.items() if total == 0},
            micro_batches=self._counts.labels.micro_batches,
        )


def sum_of_terms(loss: Loss | float) -> Tensor:
    """The loss as one 0-d tensor: itself, or the sum of its named terms.

    Raises:
        TaskError: it is neither a single number nor a dict of such.
    """
    if isinstance(loss, Mapping):
        if not loss:
            raise TaskError("it returned an empty dict; return at least one term.")
        terms = [sum_of_terms(term) for term in loss.values()]
        return sum(terms[1:], start=terms[0])
    if not isinstance(loss, Tensor) and (number := real_number(loss)) is not None:
        return torch.tensor(number)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise TaskError(
            f"it returned {describe(loss)}; it must be a real 0-d tensor, the mean over the micro-batch's "
            f"valid labels, or a dict of such terms."
        )
    return loss.reshape(())
