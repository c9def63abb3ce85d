"""Evaluation: each task's mean loss and metrics over a loader."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtaccum.batch import own_view, to_device
from mtaccum.engine import LabelCounts
from mtaccum.engine.result import sum_of_terms
from mtaccum.model import MultiTaskModel, evaluating
from mtaccum.parallel import Collectives, current_ranks, unsharded
from mtaccum.state import random_state_kept
from mtaccum.tasks import Task

if TYPE_CHECKING:
    from torchmetrics import Metric

Evaluation = dict[str, dict[str, float]]


def evaluate(model: MultiTaskModel, loader: Iterable[Any], ranks: Collectives | None = None) -> Evaluation:
    """Metrics of all enabled tasks over a loader, in evaluation mode and without a graph.

    Args:
        model: left as it was, training mode included; so are all random streams.
        loader: batches with inputs and targets; a task is skipped where a batch has no label of it. With
            several ranks each gives its share of the data; all get the metrics of all of it.
        ranks: None: those of PyTorch's default process group.

    Returns:
        For each task its metrics by name: ``loss``, the mean over all valid labels, and those of
        ``Task.metrics``. Empty for a task that had no label at all.
    """
    ranks = current_ranks() if ranks is None else ranks
    model = unsharded(model)
    tasks = {name: model.task(name) for name in model.enabled_tasks()}
    metrics = {name: _metrics_of(task, model.device, ranks) for name, task in tasks.items()}
    losses: dict[str, list[float]] = {name: [] for name in tasks}
    counts: dict[str, list[float]] = {name: [] for name in tasks}
    with random_state_kept(), evaluating(model):
        for batch in loader:
            labels = LabelCounts.of(tasks, [batch])
            active = labels.active_in(0)
            batch = to_device(batch, model.device)
            predictions = model(batch, tasks=active)
            for name in active:
                loss = sum_of_terms(tasks[name].loss(predictions[name], own_view(batch)))
                losses[name].append(loss.item() * labels.count(name, 0))
                counts[name].append(labels.count(name, 0))
                tasks[name].update_metrics(metrics[name], predictions[name], own_view(batch))
    sums = [math.fsum(numbers[name]) for name in tasks for numbers in (losses, counts)]
    totals = iter(ranks.all_reduce_sum(sums))
    _alike_where_empty([m for named in metrics.values() for m in named.values()], ranks)
    return {name: _computed(next(totals), next(totals), metrics[name]) for name in tasks}


def _metrics_of(task: Task, device: torch.device, ranks: Collectives) -> dict[str, Metric]:
    metrics = {key: metric.to(device) for key, metric in task.metrics().items()}
    if ranks.world_size == 1:
        for metric in metrics.values():
            metric.distributed_available_fn = lambda: False  # this evaluation is this process's own
    return metrics


def _computed(loss: float, count: float, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Mean loss and metrics of a task; nothing if it had no label."""
    if count <= 0:
        return {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*compute.*before.*update.*")  # another rank had labels
        return {"loss": loss / count, **{key: float(metric.compute()) for key, metric in metrics.items()}}


def _alike_where_empty(metrics: Sequence[Metric], ranks: Collectives) -> None:
    """Give lists of tensors that are empty on this rank an empty tensor of the kind that other ranks have;
    torchmetrics would send one of its default dtype, which gloo then takes for the others' bytes."""
    if ranks.world_size == 1:
        return
    states = [
        (metric, getattr(metric, name)) for metric in metrics for name in getattr(metric, "_defaults", ())
    ]
    lists = [(metric, state) for metric, state in states if isinstance(state, list)]
    of_all = ranks.all_gather_object([_kind(state) for _, state in lists])
    for (metric, state), kinds in zip(lists, zip(*of_all, strict=True), strict=True):
        kind = next(filter(None, kinds), None)
        if kind is not None and not state:
            shape, dtype = kind
            state.append(torch.empty((0, *shape), dtype=dtype, device=metric.device))


def _kind(tensors: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and type of the rows that tensors consist of; None if there are none."""
    return next(((tuple(t.shape[1:]), t.dtype) for t in tensors if isinstance(t, Tensor) and t.dim()), None)


def weighted_loss(model: MultiTaskModel, evaluation: Evaluation) -> float:
    """The sum over tasks of weight * validation loss; NaN if no task had a label."""
    losses = [model.task(name).weight * m["loss"] for name, m in evaluation.items() if "loss" in m]
    return math.fsum(losses) if losses else math.nan
