"""The profile of a step: a predicted step looked at op by op."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.memory.ledger import ACTIVATIONS, FEATURES, PARAMETERS, TEMPORARIES, storages_of
from mtaccum.memory.predict import FakeTraining, FlopTracker, Prediction
from mtaccum.observe import FORWARD, observed
from mtaccum.planning.profile import Chain, Made, find_candidates
from mtaccum.torch_internals import address_of, graph_node_number, running_graph_node, sequence_number


@dataclass(frozen=True)
class Profile:
    """What the planner knows of a model's step.

    Attributes:
        prediction: of the step that was watched: ``split``, one micro-batch.
        chains: by node; of the nodes that ran.
        gradient_bytes: of all gradients together.
        ops: names of all ops.
    """

    prediction: Prediction
    chains: dict[str, Chain]
    gradient_bytes: int
    ops: frozenset[str]


def profile_of(training: FakeTraining) -> Profile:
    """Watch a predicted step of the ``split`` schedule, run as one micro-batch."""
    watchers: list[StepWatcher] = []
    nodes = training.model.own_modules()
    modules = {part: name for name, module in nodes.items() for part in module.modules()}

    def make(*args: Any, **kwargs: Any) -> StepWatcher:
        watchers.append(StepWatcher(set(nodes), *args, **kwargs))
        return watchers[-1]

    def entered(*args: Any) -> None:
        watchers[0].entered(*args)

    def left(*args: Any) -> None:
        watchers[0].left(*args)

    with observed(modules, entered=entered, left=left, outermost=True):
        prediction = training.predict(training.options, timeline=True, make_tracker=make)
    watcher = watchers[0]
    for node, chain in watcher.chains.items():
        found = find_candidates(chain, nodes[node], watcher.calls)
        chain.candidates = [candidate for candidate in found if chain.may_run_again(candidate)]
    gradients = sum(p.nbytes for p in training.model.parameters() if p.requires_grad)
    ops = frozenset(moment.op for moment in watcher.timeline)
    return Profile(prediction, watcher.chains, gradients, ops)


class StepWatcher(FlopTracker):  # type: ignore[no-untyped-call]
    """Notes for each op of a step the node and position that it belongs to.

    Attributes:
        chains: by node, as far as they have run.
        calls: for each module, by its id, the node and the positions of each of its runs.
    """

    def __init__(self, nodes: set[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chains: dict[str, Chain] = {}
        self.calls: dict[int, list[tuple[str, int, int]]] = {}
        self._nodes = nodes
        self._open: list[int] = []  # where the modules that run now began
        self._numbers: dict[str, list[int]] = {}  # autograd's sequence number as each position began
        self._bytes_after_forward: dict[str, int] = {}
        self._in_backward_of = ("", 0)  # a node and the position that its backward has come to

    def entered(self, _name: str, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """A module begins."""
        if (chain := self._running()) is not None:
            self._open.append(self._next_position(chain))

    def left(self, _name: str, module: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        """It has ended."""
        if (chain := self._running()) is not None:
            call = (chain.node, self._open.pop(), self._next_position(chain))
            self.calls.setdefault(id(module), []).append(call)

    def label(self, values: object, kind: int) -> None:
        super().label(values, kind)
        if kind in (ACTIVATIONS, FEATURES):
            for storage in storages_of(values):
                if (made := self._note(storage)) is not None:
                    made.kept = True
                    made.is_feature |= kind == FEATURES

    def counted(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        before = self.flops
        super().counted(func, args, kwargs, result)
        node, _, phase = self.stage.rpartition(" ")
        growing = sum(self.ledger.by_kind[FEATURES:])
        fixed = self.current_bytes - growing
        if (chain := self._running()) is not None:
            at = len(chain) - 1
            chain.forward[at].rise(growing, fixed)
            chain.flops[at] += self.flops - before
            chain.draws |= _draws(func, args, kwargs)
            self._note_storages(chain, at, func, args, kwargs, result)
            self._bytes_after_forward[node] = self.current_bytes
        elif phase and node in self.chains:
            chain = self.chains[node]
            if node in self._bytes_after_forward:
                self._in_backward_of = (node, len(chain) - 1)
                chain.incoming_bytes = max(0, self.current_bytes - self._bytes_after_forward.pop(node))
            chain.backward[self._position_in_backward(node)].rise(growing, fixed)

    def _running(self) -> Chain | None:
        """The chain whose forward is running."""
        node, _, phase = self.stage.rpartition(" ")
        if phase != FORWARD or node not in self._nodes:
            return None
        if node not in self.chains:
            self.chains[node], self._numbers[node], self._open = Chain(node), [], []
            self.chains[node].start_bytes = sum(self.ledger.by_kind[FEATURES:])
            self._next_position(self.chains[node])
        return self.chains[node]

    def _next_position(self, chain: Chain) -> int:
        self._numbers[chain.node].append(sequence_number())
        return chain.add_position()

    def _position_in_backward(self, node: str) -> int:
        """The forward position whose graph node is running; the last one known where that has none, as
        where a gradient is added to a parameter's."""
        current = running_graph_node()
        numbers = self._numbers[node]
        if current is not None and numbers[0] <= graph_node_number(current) < 2**62:
            place = bisect_right(numbers, graph_node_number(current)) - 1
            if place <= self._in_backward_of[1]:
                self._in_backward_of = (node, place)
        return self._in_backward_of[1]

    def _note(self, storage: torch.UntypedStorage) -> Made | None:
        ref = self.ledger.refs.get(address_of(storage))
        return None if ref is None else ref.note

    def _note_storages(
        self, chain: Chain, at: int, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        for storage in storages_of((args, kwargs)):
            if (made := self._note(storage)) is not None:
                made.uses.append(at)
        for tensor in _written(func, args, kwargs):
            for storage in storages_of(tensor):
                ref = self.ledger.refs.get(address_of(storage))
                if ref is not None and ref.note is not None:
                    chain.writes.append((ref.note, at))
                elif ref is not None and ref.kind == PARAMETERS:
                    chain.changes |= tensor.is_floating_point()
        for storage in storages_of(result):
            ref = self.ledger.refs.get(address_of(storage))
            if ref is not None and ref.note is None and ref.kind == TEMPORARIES:
                ref.note = Made(at, ref.nbytes)
                chain.made.append(ref.note)
                chain.moved_bytes[at] += ref.nbytes


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an op draws random numbers; attention and dropout with a probability of 0 draw none."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return {**defaults, **given}.get("dropout_p") != 0.0


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an op writes into."""
    if func._schema.is_mutable:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            alias, value = argument.alias_info, given.get(argument.name)
            if alias is not None and alias.is_write and isinstance(value, Tensor):
                yield value
