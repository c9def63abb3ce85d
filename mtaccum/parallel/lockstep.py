"""Lockstep: where parameters are sharded, all ranks run every pass that any of them runs, in one order.

A rank may have fewer micro-batches than another, or no label of a task where another has some. It then runs
the missing pass on samples of its own or of another rank, with a loss of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from mtaccum.batch import batch_size_of, take_samples, to_device
from mtaccum.errors import BatchError
from mtaccum.parallel.collectives import Collectives
from mtaccum.parallel.ranks import Agreement, TasksByMicroBatch
from mtaccum.structure import tensors_of

_LENT = 2  # samples; BatchNorm refuses a single one


def union_of(names: Sequence[str], of_ranks: Sequence[TasksByMicroBatch]) -> tuple[tuple[str, ...], ...]:
    """For each micro-batch the tasks that any rank runs, in the order of ``names``."""
    longest = max(map(len, of_ranks), default=0)
    active = [
        {name for tasks in of_ranks if index < len(tasks) for name in tasks[index]}
        for index in range(longest)
    ]
    return tuple(tuple(name for name in names if name in tasks) for tasks in active)


def filled_up(window: Sequence[Any], agreement: Agreement, ranks: Collectives) -> list[Any]:
    """A window with as many micro-batches as the longest one of all ranks.

    What is missing here, or has no label and too few samples for a BatchNorm, is replaced by this rank's
    largest micro-batch, or by a few samples that another rank lends; its passes change nothing.
    """
    batches = list(window) + [None] * (len(agreement.running) - len(window))
    missing = [i for i, batch in enumerate(batches) if not active_in(agreement, i) and _size(batch) < _LENT]
    own = max(window, key=_size, default=None)
    if ranks.any(bool(missing) and _size(own) < _LENT):
        own = max([own, *ranks.all_gather_object(_lent(own))], key=_size)
    for index in missing:
        batches[index] = own
    return batches


def active_in(agreement: Agreement, micro_batch: int) -> Sequence[str]:
    """The tasks that have a label on this rank; none in a micro-batch that only other ranks have."""
    return agreement.active[micro_batch] if micro_batch < len(agreement.active) else ()


def zero_through(prediction: Any) -> Tensor:
    """A zero whose backward runs through what has made a prediction, and adds zeros."""
    made = [tensor for tensor in tensors_of(prediction, strict=False) if tensor.requires_grad]
    sums = [(tensor.real if tensor.is_complex() else tensor).sum() * 0 for tensor in made]
    return sum(sums, start=torch.zeros(()))


def _size(batch: Any) -> int:
    return 0 if batch is None else batch_size_of(batch)


def _lent(batch: Any) -> Any:
    if _size(batch) == 0:
        return None
    with suppress(BatchError):  # it can't be split
        batch = take_samples(batch, min(_LENT, batch_size_of(batch)))
    return to_device(batch, torch.device("cpu"))
