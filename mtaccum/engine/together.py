"""Together: where parameters are spread over the ranks, all of them run every pass that any of them runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mtaccum.batch import batch_size_of, take_samples, to_device
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import BatchError, TaskError
from mtaccum.model.tree import MultiTaskModel, Tree
from mtaccum.parallel.fsdp import nodes_of
from mtaccum.parallel.ranks import Ranks
from mtaccum.parallel.reached import reached_of

_LENT = 2  # samples; BatchNorm refuses a single one


def with_stand_ins(window: Sequence[Any], plan: WindowPlan, ranks: Ranks) -> list[Any]:
    """A window with as many micro-batches as the longest one of all ranks. What is missing here, or has no
    label and too few samples for a BatchNorm, is made up of this rank's largest one, or of a few samples that
    another rank lends; its passes change nothing."""
    assert plan.union is not None
    batches = list(window) + [None] * (len(plan.union) - len(window))
    missing = [i for i, batch in enumerate(batches) if not plan.active(i) and _size(batch) < _LENT]
    own = max(window, key=_size, default=None)
    (any_lacks,) = ranks.largest([float(bool(missing) and _size(own) < _LENT)])
    if any_lacks:
        own = max([own, *ranks.gather(_lent(own))], key=_size)
    for index in missing:
        batches[index] = own
    return batches


def _size(batch: Any) -> int:
    return 0 if batch is None else batch_size_of(batch)


def _lent(batch: Any) -> Any:
    if _size(batch) == 0:
        return None
    with suppress(BatchError):  # it can't be cut
        batch = take_samples(batch, min(_LENT, batch_size_of(batch)))
    return to_device(batch, torch.device("cpu"))


def prepare_nodes(
    model: MultiTaskModel, plan: WindowPlan, micro_batch: int, tree: Tree, *, each: bool = False
) -> None:
    """Before a micro-batch: find the task with which each node learns for the last time in the window, and
    note what losses of this rank come to.

    Args:
        tree: of the tasks that are run in it, in the order in which they are.
        each: let every backward reduce gradients, and not only each node's last one.
    """
    assert plan.union is not None
    for name, node in nodes_of(model).items():
        below = {task for task in model.tasks_below(name) if task == name or _sends_back(model, task)}
        last = max((index for index, tasks in enumerate(plan.union) if below & set(tasks)), default=-1)
        if micro_batch == last:
            *_, reached_of(node).reduces_after = (task for task in _leaves(tree) if task in below)
        reached_of(node).counts = bool(below & set(plan.active(micro_batch)))
        node.set_requires_gradient_sync(each)


def _leaves(tree: Tree) -> Iterator[str]:
    for name, below in tree.items():
        yield from _leaves(below) if below else (name,)


def let_reduce(model: MultiTaskModel, task: str) -> None:
    """Before a task's head runs: let nodes that learn for the last time with it reduce their gradients."""
    for node in nodes_of(model).values():
        if reached_of(node).reduces_after == task:
            node.set_requires_gradient_sync(True)


def _sends_back(model: MultiTaskModel, task: str) -> bool:
    return model.task(task).mode != "detached"


def note_nothing(model: MultiTaskModel, task: str) -> None:
    """Let the zeros that a head's pass in this micro-batch ends with not count as gradients."""
    if (node := nodes_of(model).get(task)) is not None:
        reached_of(node).counts = False


@contextmanager
def keeping_none(model: MultiTaskModel, ranks: Ranks) -> Iterator[None]:
    """Around the passes of a window: parameters of nodes that no rank's losses come to get no gradient.

    Raises:
        TaskError: passes failed in an earlier window. PyTorch can't go on from within a pass.
    """
    nodes = nodes_of(model)
    if any(reached_of(node).broken for node in nodes.values()):
        raise TaskError(
            "an earlier step failed while parameters were gathered from the ranks, and they can't be spread "
            "again. Start all ranks again, from a checkpoint."
        )
    for node in nodes.values():
        reached_of(node).names.clear()
        reached_of(node).reduces_after = None
    try:
        yield
    except BaseException:
        for node in nodes.values():
            reached_of(node).broken = True
        raise
    parameters = [
        (parameter, name in reached_of(node).names)
        for node in nodes.values()
        for name, parameter in node.named_parameters()
    ]
    by_any = ranks.largest([float(reached) for _, reached in parameters])
    for (parameter, _), reached_by_any in zip(parameters, by_any, strict=True):
        if not reached_by_any:
            parameter.grad = None
    _check_reduced(nodes, {id(p) for (p, _), reached in zip(parameters, by_any, strict=True) if reached})


def _check_reduced(nodes: Mapping[str, Any], reached: Set[int]) -> None:
    """Gradients are reduced in a node's last backward; there is none if a head doesn't send anything back."""
    for name, node in nodes.items():
        task = reached_of(node).reduces_after
        if task is not None and any(id(p) in reached and p.grad is None for p in node.parameters()):
            reached_of(node).broken = True
            raise TaskError(
                f"under parallel=fsdp {name!r} can't learn here: the last task in the window to teach "
                f"it is {task!r}, and sends it no gradient. If the head is meant to send none, say so by "
                f"mode='detached'."
            )
