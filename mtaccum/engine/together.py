"""Together: where parameters are spread over the ranks, all of them run every pass that any of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtaccum.batch import batch_size_of, take_samples, to_device
from mtaccum.engine.window import WindowPlan
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.fsdp import nodes_of
from mtaccum.parallel.ranks import Ranks

_LENT = 2  # samples; BatchNorm refuses a single one


def with_stand_ins(window: Sequence[Any], plan: WindowPlan, ranks: Ranks) -> list[Any]:
    """A window with as many micro-batches as the longest one of all ranks. What is missing here is made up of
    this rank's last one, or of a few samples that another rank lends; its passes change nothing."""
    assert plan.union is not None
    batches, wanted = list(window), len(plan.union)
    (any_lacks,) = ranks.largest([float(not batches and wanted > 0)])
    if any_lacks:
        offered = [offer for offer in ranks.gather(_lent(batches)) if offer is not None]
        batches = batches or offered[:1]
    return batches + batches[-1:] * (wanted - len(batches))


def _lent(batches: Sequence[Any]) -> Any:
    if not batches or batch_size_of(batches[0]) == 0:
        return None
    samples = min(_LENT, batch_size_of(batches[0]))
    return to_device(take_samples(batches[0], samples), torch.device("cpu"))


def reduce_after(model: MultiTaskModel, plan: WindowPlan, micro_batch: int) -> None:
    """Let the nodes that run for the last time in this micro-batch reduce their gradients, and no others."""
    assert plan.union is not None
    for name, node in nodes_of(model).items():
        below = set(model.tasks_below(name))
        last = max((index for index, tasks in enumerate(plan.union) if below & set(tasks)), default=-1)
        node.set_requires_gradient_sync(micro_batch == last)
