"""What a step reports: the losses of a window, gathered while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtaccum.engine.window import WindowPlan
from mtaccum.errors import TaskError
from mtaccum.parallel.ranks import ALONE, Ranks
from mtaccum.structure import describe
from mtaccum.tasks.base import Loss


@dataclass(frozen=True)
class StepResult:
    """What happened in one window. Holds no graph; tensors stay on the model's device.

    Attributes:
        losses: for each task that was run, the mean loss over the window's valid labels (0-d, detached).
        parts: the same for each named part of a loss that is a dict, by ``task/part``.
        counts: for each enabled task the number (or weight) of its valid labels in the window.
        skipped: why an enabled task was not run in this window: ``{"depth": "no labels"}``.
        micro_batches: how many micro-batches the window had.
        grad_norm: norm of all gradients together before clipping (0-d); None without a step.
        stepped: whether the optimizer stepped. A window without any label is no step.
        nonfinite: what was not finite, where the step was skipped for that.
    """

    losses: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]
    counts: Mapping[str, float]
    skipped: Mapping[str, str]
    micro_batches: int
    grad_norm: Tensor | None = None
    stepped: bool = False
    nonfinite: str | None = None


class LossLog:
    """Adds up each task's loss over a window, without a graph and without waiting for the device.

    Args:
        plan: the window's counts.
        device: where the losses are.
    """

    searches = False
    """Whether gradients are looked at after each backward."""

    def __init__(self, plan: WindowPlan, device: torch.device | str = "cpu") -> None:
        self._plan = plan
        self._device = torch.device(device)
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, task: str, micro_batch: int, loss: Loss, total: Tensor, chunk: int | None = None) -> None:
        """Note the loss of one micro-batch, or of a chunk of one: the mean over its labels, as ``Task.loss``
        returned it, and its sum over parts."""
        count = self._plan.count(task, micro_batch, chunk)
        self._add(task, total, count)
        if isinstance(loss, Mapping):
            for part, value in loss.items():
                self._add(f"{task}/{part}", sum_of_parts(value), count)

    def stands_in(self, task: str, micro_batch: int) -> None:
        """Note that a task runs here only since it does on another rank: it has no loss."""

    def _add(self, name: str, value: Tensor, count: float) -> None:
        # in double, so that the mean of K equal losses is that loss again
        wide = torch.float32 if value.device.type == "mps" else torch.float64
        weighted = value.detach().to(wide) * count
        self._dtypes[name] = value.dtype
        self._sums[name] = weighted if name not in self._sums else self._sums[name] + weighted

    def result(self, ranks: Ranks = ALONE) -> StepResult:
        """The means over the window, on all ranks together."""
        totals = self._plan.totals
        self._add_others(ranks)
        means = {
            name: (value / totals[name.split("/")[0]]).to(self._dtypes[name])
            for name, value in self._sums.items()
        }
        return StepResult(
            losses={name: mean for name, mean in means.items() if name in totals},
            parts={name: mean for name, mean in means.items() if name not in totals},
            counts=totals,
            skipped={name: "no labels" for name, total in totals.items() if total == 0},
            micro_batches=self._plan.micro_batches,
        )

    def _add_others(self, ranks: Ranks) -> None:
        """Add the sums of the other ranks, of which some may have run other tasks."""
        if ranks.size == 1:
            return
        self._dtypes = {name: of for dtypes in ranks.gather(self._dtypes) for name, of in dtypes.items()}
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        if sums := [self._sums.get(name, zero) for name in self._dtypes]:
            self._sums = dict(zip(self._dtypes, ranks.sum_tensor(torch.stack(sums)).unbind(), strict=True))


def sum_of_parts(loss: Loss | float) -> Tensor:
    """The loss as one 0-d tensor: itself, or the sum of its named parts.

    Raises:
        TaskError: it is neither a single number nor a dict of such.
    """
    if isinstance(loss, Mapping):
        if not loss:
            raise TaskError("it returned an empty dict; return at least one part.")
        parts = [sum_of_parts(part) for part in loss.values()]
        return sum(parts[1:], start=parts[0])
    if isinstance(loss, int | float):
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise TaskError(
            f"it returned {describe(loss)}; it must be a real 0-d tensor, the mean over the micro-batch's "
            f"valid labels, or a dict of such parts."
        )
    return loss.reshape(())
