"""Whether a task's ``count`` matches its ``loss``: that of a batch is the weighted mean of its samples'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtaccum.batch import batch_size_of, own_view, split_batch
from mtaccum.engine.result import sum_of_terms
from mtaccum.errors import MtaccumError
from mtaccum.exactness.reference import predictions
from mtaccum.exactness.report import Finding
from mtaccum.model import MultiTaskModel, evaluating
from mtaccum.structure import tensors_of

_MARGIN = 100  # sums of losses round more than those of gradients


def check_counts(model: MultiTaskModel, batch: Any, active: Sequence[str], *, bound: float) -> list[Finding]:
    """Compare each task's loss on a batch with that on its samples, one by one.

    Runs in evaluation mode, where no layer couples samples and nothing is drawn.

    Args:
        batch: at least 2 samples; better more, with labels missing here and there.
        bound: relative error of the precision that model and batch are in.
    """
    samples = batch_size_of(batch)
    if samples < 2:
        return [Finding("count", ", ".join(active), "not checked: there is only one sample.", fault=False)]
    with evaluating(model):
        found = (_check(model, name, batch, samples, _MARGIN * bound) for name in active)
        return [finding for finding in found if finding is not None]


def _check(model: MultiTaskModel, name: str, batch: Any, samples: int, tolerance: float) -> Finding | None:
    task = model.task(name)
    try:
        (prediction,) = [p for _, p in predictions(model, batch, [name])]
        whole, again = (sum_of_terms(task.loss(prediction, own_view(batch))) for _ in range(2))
        if not torch.equal(whole, again):
            return _unchecked(name, "its loss draws random numbers")
        total = float(task.count(own_view(batch)))
        singles = split_batch(batch, samples)
        made: Sequence[Any]
        if _per_sample(prediction, samples):
            made = split_batch(prediction, samples)
        else:  # a loss computed in the forward, say
            made = [next(p for _, p in predictions(model, single, [name])) for single in singles]
        counts = [float(task.count(own_view(single))) for single in singles]
        losses = [
            float(sum_of_terms(task.loss(predicted, own_view(single)))) if count > 0 else 0.0
            for predicted, single, count in zip(made, singles, counts, strict=True)
        ]
    except (MtaccumError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        return _unchecked(name, f"its samples can't be taken one by one ({type(error).__name__}: {error})")
    if abs(sum(counts) - total) > tolerance * max(abs(total), 1):
        return Finding(
            "count",
            name,
            f"count() gives {total:g} for {samples} samples, but {sum(counts):g} for these one by one. "
            f"Let it count the labels of the batch it is given, by the same rule for every size.",
        )
    mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / total
    difference = abs(mean - float(whole))
    if difference <= tolerance * max(abs(float(whole)), sum(map(abs, losses)) / samples):
        return None
    if not task.additive:
        return None  # known, and said where it matters
    return Finding(
        "count",
        name,
        f"the loss of {samples} samples is {float(whole):.6g}, but the mean of their own losses, weighted by "
        f"count(), is {mean:.6g}. If the loss is a mean over labels, let count() return how many it is over "
        f"(or the sum of their weights); if it isn't (Dice, contrastive, matched detection), set "
        f"additive = False.",
    )


def _unchecked(name: str, why: str) -> Finding:
    return Finding("count", name, f"count() was not compared with the loss: {why}.", fault=False)


def _per_sample(prediction: Any, samples: int) -> bool:
    """Whether each tensor of a prediction has one entry per sample."""
    if isinstance(prediction, Mapping) and not prediction:
        return False
    tensors: list[Tensor] = tensors_of(prediction, strict=False)
    return bool(tensors) and all(tensor.dim() > 0 and tensor.shape[0] == samples for tensor in tensors)


def not_additive(model: MultiTaskModel, micro_batches: int) -> list[Finding]:
    """Tasks that say of themselves that their loss is no mean over labels."""
    return [
        Finding(
            "non-additive loss",
            name,
            f"its loss is not a mean over labels (additive = False): with {micro_batches} micro-batches "
            f"its gradient is not that of the whole batch. Use accumulate=1."
            if micro_batches > 1
            else "its loss is not a mean over labels (additive = False): exact with one micro-batch only.",
            fault=micro_batches > 1,
        )
        for name in model.enabled_tasks()
        if not model.task(name).additive
    ]
