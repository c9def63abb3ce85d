"""Binding: a model's tree and one micro-batch become the nodes that a schedule walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtaccum.engine.replay import frozen, is_frozen
from mtaccum.engine.result import LossLog, sum_of_parts
from mtaccum.engine.schedules import Features, Node
from mtaccum.engine.window import WindowPlan
from mtaccum.model.tree import ROOT, MultiTaskModel, Tree, named_errors
from mtaccum.structure import describe, detach
from mtaccum.tasks.base import Task


def bind(
    model: MultiTaskModel,
    batch: Any,
    plan: WindowPlan,
    micro_batch: int,
    active: Sequence[str],
    log: LossLog,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[list[Node], Any]:
    """The nodes that lead to the active tasks, and the inputs that the roots get.

    Args:
        batch: the micro-batch, on the model's device.
        micro_batch: its index in the window of ``plan``.
        active: the tasks that have labels in it; the others are not run.
        log: is told each task's loss.
        autocast: entered around each node's forward.
    """
    binding = _Binding(model, batch, plan, micro_batch, log, autocast)
    return list(binding.nodes(model.tree(active))), model.inputs(batch)


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

    def nodes(self, tree: Tree) -> tuple[Node, ...]:
        return tuple(
            self.leaf(name) if name in self.plan.counts else self.inner(name, below)
            for name, below in tree.items()
        )

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
        with self.autocast(), frozen(module) if is_frozen(module) else nullcontext():
            return self.model.run(name, above, self.batch)

    def leaf(self, name: str) -> Node:
        task = self.model.task(name)
        scale = self.plan.scale(name, self.micro_batch)
        return Node(
            name,
            run=lambda features: self.loss(name, task, features) * scale,
            learns=task.mode != "detached",
        )

    def loss(self, name: str, task: Task, features: Features) -> Tensor:
        """The task's mean loss on this micro-batch, with its graph."""
        if task.mode == "detached":
            features = {n: nest if n == ROOT else detach(nest) for n, nest in features.items()}
        with self.autocast(), frozen(task) if is_frozen(task) else nullcontext():
            prediction = self.model.run(name, features, self.batch)
            with named_errors(lambda: f"the loss of task {name!r}, given {describe(prediction)}"):
                loss = task.loss(prediction, self.batch)
                total = sum_of_parts(loss)
        self.log.add(name, self.micro_batch, loss, total)
        return total
