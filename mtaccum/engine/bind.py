"""Binding: a model's tree and one micro-batch become the nodes that a schedule walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtaccum.batch import batch_size_of, split_sizes, take_part
from mtaccum.engine.arrangement import Arrangement
from mtaccum.engine.replay import frozen, is_frozen, without_trace
from mtaccum.engine.result import LossLog, sum_of_parts
from mtaccum.engine.schedules import Features, Node
from mtaccum.engine.together import let_reduce, note_nothing
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import FeatureError
from mtaccum.model.tree import ROOT, MultiTaskModel, Tree, named_errors
from mtaccum.structure import describe, detach, map_tensors, tensors_of
from mtaccum.tasks.base import Task

_EACH_HEAD = Arrangement()


def bind(
    model: MultiTaskModel,
    batch: Any,
    plan: WindowPlan,
    micro_batch: int,
    active: Sequence[str],
    log: LossLog,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    arrangement: Arrangement = _EACH_HEAD,
) -> tuple[list[Node], Any]:
    """The nodes that lead to the active tasks, and the inputs that the roots get.

    Args:
        batch: the micro-batch, on the model's device.
        micro_batch: its index in the window of ``plan``.
        active: the tasks to run: those that have labels in it, here or on another rank.
        log: is told each task's loss.
        autocast: entered around each node's forward.
        arrangement: which heads become one node, and which become several.
    """
    binding = _Binding(model, batch, plan, micro_batch, log, autocast, arrangement)
    return list(binding.nodes(model.tree(arrangement.in_order(active)))), model.inputs(batch)


@dataclass(frozen=True)
class _Binding:
    # Methods, not nested functions: functions that call each other are a reference cycle, which would
    # keep the batch alive until the garbage collector happens to run.
    model: MultiTaskModel
    batch: Any
    plan: WindowPlan
    micro_batch: int
    log: LossLog
    autocast: Callable[[], AbstractContextManager[Any]]
    arrangement: Arrangement

    @cached_property
    def active(self) -> list[str]:
        """The tasks that have labels here."""
        return self.plan.active(self.micro_batch)

    def nodes(self, tree: Tree) -> tuple[Node, ...]:
        return tuple(self.nodes_of(tree))

    def nodes_of(self, tree: Tree) -> Iterator[Node]:
        """A node for each trunk and neck; for heads one each, or per group, or for each of their chunks."""
        for name, below in tree.items():
            if name not in self.plan.counts:
                yield self.inner(name, below)
            elif name in self.plan.parts:
                counts = self.plan.parts[name][self.micro_batch]
                yield from (self.leaf(name, chunk) for chunk, count in enumerate(counts) if count > 0)
            elif not self.arrangement.joined:
                yield self.head(name)
            else:
                group = [member for member in tree if member in self.arrangement.group_of(name)]
                if name == group[0]:
                    yield _together([self.head(member) for member in group])

    def inner(self, name: str, below: Tree) -> Node:
        return Node(
            name,
            run=lambda features: self.features(name, features),
            children=self.nodes(below),
            module=self.model.node(name),
        )

    def features(self, name: str, above: Features) -> Any:
        """What a trunk or neck hands on. One that doesn't learn keeps its buffers, ``.train()`` or not."""
        module = self.model.node(name)
        kept: AbstractContextManager[Any] = frozen(module) if is_frozen(module) else nullcontext()
        if not set(self.model.tasks_below(name)) & set(self.active):
            kept = without_trace(module)
        with self.autocast(), kept:
            return self.model.run(name, above, self.batch)

    def head(self, name: str) -> Node:
        """A head that learns here, or one that only other ranks learn from and all have to run."""
        if name in self.active:
            return self.leaf(name)
        task = self.model.task(name)
        return Node(
            name, run=lambda features: self.nothing(name, task, features), learns=task.mode != "detached"
        )

    def nothing(self, name: str, task: Task, features: Features) -> Tensor:
        """A zero whose backward runs through a head and adds zeros."""
        let_reduce(self.model, name)
        self.log.stands_in(name, self.micro_batch)
        if task.mode == "detached":
            features = {n: nest if n == ROOT else detach(nest) for n, nest in features.items()}
        with self.autocast(), without_trace(task):
            return _nothing(self.model.run(name, features, self.batch))

    def leaf(self, name: str, chunk: int | None = None) -> Node:
        task = self.model.task(name)
        scale = self.plan.scale(name, self.micro_batch, chunk)
        return Node(
            name,
            run=lambda features: self.loss(name, task, features, chunk) * scale,
            learns=task.mode != "detached",
        )

    def loss(self, name: str, task: Task, features: Features, chunk: int | None) -> Tensor:
        """The task's mean loss on this micro-batch, or on a chunk of it, with its graph."""
        if self.plan.union is not None:
            let_reduce(self.model, name)
        batch = self.batch
        if task.mode == "detached":
            features = {n: nest if n == ROOT else detach(nest) for n, nest in features.items()}
        if chunk is not None:
            features, batch = self.part(name, features, chunk)
        with self.autocast(), frozen(task) if is_frozen(task) else nullcontext():
            prediction = self.model.run(name, features, batch)
            with named_errors(lambda: f"the loss of task {name!r}, given {describe(prediction)}"):
                loss = task.loss(prediction, batch)
                total = sum_of_parts(loss)
        self.log.add(name, self.micro_batch, loss, total, chunk)
        if self.plan.union is not None and not total.requires_grad:  # on another rank there may be a backward
            note_nothing(self.model, name)
            return total + _nothing(prediction)
        return total

    def part(self, name: str, features: Features, chunk: int) -> tuple[Features, Any]:
        """What a head gets for a chunk: the features that it reads, and the batch."""
        samples, parts = batch_size_of(self.batch), len(self.plan.parts[name][self.micro_batch])
        sizes = split_sizes(samples, parts)
        rows = slice(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
        with named_errors(lambda: f"chunks of task {name!r}"):
            batch = take_part(self.batch, samples, parts, chunk)
            return {
                node: self.model.inputs(batch) if node == ROOT else _rows(node, features[node], samples, rows)
                for node in self.model.sources(name)
            }, batch


def _nothing(prediction: Any) -> Tensor:
    """A zero whose backward runs through what has made a prediction, and adds zeros."""
    made = [tensor for tensor in tensors_of(prediction, strict=False) if tensor.requires_grad]
    sums = [(tensor.real if tensor.is_complex() else tensor).sum() * 0 for tensor in made]
    return sum(sums, start=torch.zeros(()))


def _rows(node: str, features: Any, samples: int, rows: slice) -> Any:
    """A node's features for some of the samples. Not as batches are cut, where a list may hold one entry per
    sample: here it holds the levels of a pyramid, say, as many as there are."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if tensor.shape[0] != samples:
            raise FeatureError(
                f"the features of {node!r} hold a {describe(tensor)}, which can't be cut with {samples} "
                f"samples: its first dimension must be {samples}. Let it be so, or run the task whole."
            )
        return tensor[rows]

    return map_tensors(features, cut, strict=False)


def _together(leaves: Sequence[Node]) -> Node:
    """Heads that run one after the other and share a backward, as one node."""
    if len(leaves) == 1:
        return leaves[0]

    def run(features: Features) -> Tensor:
        losses = [leaf.run(features) for leaf in leaves]
        total: Tensor = sum(losses[1:], start=losses[0])
        return total

    name = "+".join(leaf.name for leaf in leaves)
    return Node(name, run, learns=any(leaf.learns for leaf in leaves))
