"""Binding: a model's tree and one micro-batch become the nodes that a schedule walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtaccum.batch import batch_size_of, own_view, split_sizes, take_micro_batch
from mtaccum.engine.options import StepOptions
from mtaccum.engine.outside import Outside
from mtaccum.engine.result import LossLog, sum_of_terms
from mtaccum.engine.schedules import Features, Node
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import FeatureError
from mtaccum.model.paths import ROOT
from mtaccum.model.tree import MultiTaskModel, Tree, named_errors
from mtaccum.parallel import Ranks
from mtaccum.state import not_learning
from mtaccum.structure import describe, detach, map_tensors


@dataclass(frozen=True)
class Binding:
    """A micro-batch of a window, and all that its nodes need to run.

    Its functions are methods, not nested functions: functions that call each other are a reference cycle,
    which would keep the batch alive until the garbage collector happens to run.

    Attributes:
        batch: the micro-batch, on the model's device.
        micro_batch: its index in the window.
        outside: searches the graphs that nodes make; None: they aren't searched.
        log: is told each task's loss.
        autocast: entered around each node's forward.
        share_backward: whether the heads of a head group do share a backward; otherwise they are neighbours
            only.
    """

    model: MultiTaskModel
    options: StepOptions
    ranks: Ranks
    counts: WindowCounts
    log: LossLog
    autocast: Callable[[], AbstractContextManager[Any]]
    share_backward: bool
    batch: Any
    micro_batch: int
    outside: Outside | None = None

    def bound(self, tasks: Sequence[str]) -> tuple[list[Node], Any]:
        """The nodes that lead to tasks, in the order in which these run, and the inputs of the roots."""
        return list(self._nodes(self.model.tree(tasks))), self.model.inputs(self.batch)

    def _nodes(self, tree: Tree) -> Iterator[Node]:
        """A node for each trunk and neck; for heads one each, or per head group, or for each chunk."""
        for name, below in tree.items():
            if name not in self.model.tasks:
                yield self._inner(name, below)
            elif name in self.counts.labels.chunk_counts:
                counts = self.counts.labels.chunk_counts[name][self.micro_batch]
                yield from (self._leaf(name, chunk) for chunk, count in enumerate(counts) if count > 0)
            elif not self.share_backward:
                yield self._leaf(name)
            else:
                group = [member for member in tree if member in self.options.head_group_of(name)]
                if name == group[0]:
                    yield _grouped([self._leaf(member) for member in group])

    def _inner(self, name: str, below: Tree) -> Node:
        return Node(
            name,
            run=lambda features: self.ranks.run_node(name, lambda: self._features(name, features)),
            children=tuple(self._nodes(below)),
            module=self.model.node(name),
            reads=self.batch,
        )

    def _features(self, name: str, above: Features) -> Any:
        """What a trunk or neck hands on. One that doesn't learn keeps its buffers, ``.train()`` or not."""
        with self.autocast(), self._frozen(name):
            features = self.model.run(name, above, self.batch)
        if self.outside is not None:
            self.outside.look(name, features, [dict(above), self.batch])
        return features

    def _leaf(self, name: str, chunk: int | None = None) -> Node:
        return Node(
            name,
            run=lambda features: self._scaled_loss(name, features, chunk),
            learns=self.model.task(name).mode != "detached",
            reads=self.batch,
        )

    def _scaled_loss(self, name: str, above: Features, chunk: int | None) -> Tensor:
        total = self.ranks.run_head(
            name, lambda: self._prediction(name, above), lambda: self._loss(name, above, chunk)
        )
        if name not in self.counts.labels.active_in(self.micro_batch):
            return total  # a zero, for the ranks that have labels
        return total * self.counts.scale(name, self.micro_batch, chunk)

    def _prediction(self, name: str, above: Features) -> Any:
        """Of a head by itself, without a loss."""
        with self.autocast():
            return self.model.run(name, self._given(name, above), self.batch)

    def _loss(self, name: str, above: Features, chunk: int | None) -> tuple[Any, Tensor]:
        """The task's prediction and mean loss on this micro-batch, or on a chunk of it, with their graph."""
        task, batch, features = self.model.task(name), self.batch, self._given(name, above)
        if chunk is not None:
            features, batch = self._chunk(name, features, chunk)
        with self.autocast(), self._frozen(name):
            prediction = self.model.run(name, features, batch)
            with named_errors(lambda: f"the loss of task {name!r}, given {describe(prediction)}"):
                loss = task.loss(prediction, own_view(batch))
                total = sum_of_terms(loss)
        self.log.add(name, loss, total, chunk)
        if self.outside is not None:
            self.outside.look(name, total, [dict(above), self.batch])
        return prediction, total

    def _frozen(self, name: str) -> AbstractContextManager[None]:
        return not_learning(self.model.node(name)) if self.model.is_frozen(name) else nullcontext()

    def _given(self, name: str, above: Features) -> Features:
        """The features above, detached for a task from which the trunk doesn't learn."""
        if self.model.task(name).mode != "detached":
            return above
        return {node: nest if node == ROOT else detach(nest) for node, nest in above.items()}

    def _chunk(self, name: str, features: Features, chunk: int) -> tuple[Features, Any]:
        """What a head gets for a chunk: the features that it reads, and the batch."""
        samples = batch_size_of(self.batch)
        chunks = len(self.counts.labels.chunk_counts[name][self.micro_batch])
        sizes = split_sizes(samples, chunks)
        rows = slice(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
        with named_errors(lambda: f"chunks of task {name!r}"):
            batch = take_micro_batch(self.batch, samples, chunks, chunk)
            return {
                node: self.model.inputs(batch) if node == ROOT else _rows(node, features[node], samples, rows)
                for node in self.model.sources(name)
            }, batch


def _rows(node: str, features: Any, samples: int, rows: slice) -> Any:
    """A node's features for some of the samples. Not as batches are split, where a list may hold one entry
    per sample: here it holds the levels of a pyramid, say, as many as there are."""

    def taken(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if tensor.shape[0] != samples:
            raise FeatureError(
                f"the features of {node!r} hold a {describe(tensor)}, which can't be split with {samples} "
                f"samples: its first dimension must be {samples}. Let it be so, or run the task whole."
            )
        return tensor[rows]

    return map_tensors(features, taken, strict=False)


def _grouped(leaves: Sequence[Node]) -> Node:
    """Heads that run one after the other and share a backward, as one node."""
    if len(leaves) == 1:
        return leaves[0]

    def run(features: Features) -> Tensor:
        losses = [leaf.run(features) for leaf in leaves]
        total: Tensor = sum(losses[1:], start=losses[0])
        return total

    name = "+".join(leaf.name for leaf in leaves)
    return Node(name, run, learns=any(leaf.learns for leaf in leaves), reads=leaves[0].reads)
