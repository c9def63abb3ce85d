"""Facts: what of a model decides which levers are exact, and what plans can't know."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

from mtaccum.engine.norms import batch_normalised
from mtaccum.errors import listed
from mtaccum.memory import FakeTraining
from mtaccum.model import MultiTaskModel
from mtaccum.planning.plan import EXACT, IN_DISTRIBUTION, INEXACT, Plan
from mtaccum.planning.profile import Chain

_OTHER_ON_CUDA = {
    "dropout": ("dropout", "bernoulli"),
    "scaled dot-product attention": ("scaled_dot_product",),
}
_SMALL = 0.05  # a head with less than this part of a step's FLOPs is small

Heads = frozenset[str]


class Facts:
    """What is known of a training's model before any plan is tried.

    Attributes:
        tree: of the tasks that have labels.
        chunkable: heads whose samples don't see each other, and whose loss is a mean over labels.
        quiet: those of them that draw no random numbers.
    """

    def __init__(self, training: FakeTraining, chains: dict[str, Chain]) -> None:
        self._model = model = training.model
        self._chains = chains
        self._device_type, self._precision = training.device_type, training.options.precision
        self._tasks = [name for name in model.tasks if name in chains]
        self.tree = model.tree(self._tasks)
        coupling = {} if training.options.batchnorm == "freeze" else _coupling_layers(model, chains)
        self._coupled = [layer for layers in coupling.values() for layer in layers]
        self._not_additive = [name for name in self._tasks if not model.task(name).additive]
        self._drawing = [node for node, chain in chains.items() if chain.draws]
        self._changing = [node for node, chain in chains.items() if chain.changes]
        whole = {*self._not_additive, *self._changing, *(node for node, layers in coupling.items() if layers)}
        self.chunkable = frozenset(self._tasks) - whole
        self.quiet = self.chunkable - set(self._drawing)

    def exactness(self, micro_batches: int, chunked: Heads) -> tuple[int, str]:
        """How exact a plan's gradients are, and why not more."""
        if micro_batches > 1 and self._coupled:
            return INEXACT, f"BatchNorm normalises by the micro-batch ({listed(self._coupled, 3)})"
        if micro_batches > 1 and self._not_additive:
            return INEXACT, f"the loss of {listed(self._not_additive)} is no mean over labels"
        if micro_batches > 1 and self._changing:
            return INEXACT, f"each micro-batch changes a state in {listed(self._changing)} (spectral norm?)"
        drawing = [n for n in self._drawing if n in chunked or micro_batches > 1]
        if drawing:
            return IN_DISTRIBUTION, f"other random numbers (dropout) in {listed(drawing)}"
        return EXACT, ""

    def notes(self, ops: Collection[str]) -> list[str]:
        """What is not in the plans, and what may make the truth on a CUDA card differ (the ops of a step)."""
        notes = [
            f"no label of {name} was found, so it is not planned for"
            for name in self._model.enabled_tasks()
            if name not in self._chains
        ]
        if self._device_type != "cuda":
            return notes
        different = [
            what for what, words in _OTHER_ON_CUDA.items() if any(w in op for op in ops for w in words)
        ]
        if self._precision != "fp32":
            different.append(f"autocast to {self._precision}, which casts other operations there")
        if different:
            notes.append(f"these keep other tensors on CUDA than on the CPU: {', '.join(different)}")
        return notes

    def small_heads(self, plan: Plan, flops: int) -> Iterator[tuple[str, ...]]:
        """Head groups of neighbouring small heads on one node; as neighbours they run in the same order as
        before, and draw the same random numbers."""
        options = plan.options
        busy = {*options.chunked, *(segment.split(".")[0] for segment in options.recompute)}

        def place(name: str) -> tuple[Any, ...]:
            small = 3 * self._chains[name].total_flops <= _SMALL * flops and name not in busy
            return (small, self._model.paths[name][:-1], self._model.task(name).mode)

        for (small, *_), names in groupby(self._tasks, key=place):
            group = tuple(names)
            if small and len(group) > 1:
                yield group


def _coupling_layers(model: MultiTaskModel, chains: Collection[str]) -> dict[str, list[str]]:
    """For each node its layers in which the output of one sample depends on others."""
    modules = model.own_modules()
    return {node: batch_normalised(modules[node], prefix=node) for node in modules if node in chains}
