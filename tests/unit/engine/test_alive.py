"""While a head runs, nothing of another head's graph is alive, and of a recomputed trunk only its features.

Looked at in three ways, since each is blind to something: the storages of all tensors that a node's forward
made (a tensor may die while its storage lives on in a graph), what autograd saved for backward (not seen
inside of a checkpoint), and the nodes of the graph (which hold no memory themselves, but lead to it).
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mtaccum import Engine, MultiTaskModel, Neck, Task
from mtaccum.structure import tensors_of

Pass = tuple[str, int]  # a node, and which of its passes it is


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """The first time, PyTorch imports parts of itself, and leaves garbage that holds tensors."""
    run("split", ("trunk",))
    gc.collect()


@pytest.fixture(autouse=True)
def _no_collector(_imported: None) -> Iterator[None]:
    """What only the garbage collector frees is alive."""
    gc.disable()
    yield
    gc.enable()


class Saved:
    """Stands in for a tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Mark:
    """Lies in a graph node's metadata, and dies with it."""


@dataclass(frozen=True)
class Sight:
    """What was alive at some moment of a head's forward, by the passes that made it.

    Attributes:
        activations: tensors, the features among them.
        inner: the same without the features that trunk and necks handed on.
        saved: what autograd saved.
        nodes: those of the graph.
    """

    head: str
    activations: frozenset[Pass]
    inner: frozenset[Pass]
    saved: frozenset[Pass]
    nodes: frozenset[Pass]


@dataclass
class Watch:
    """Follows what the forwards of nodes make, by weak references."""

    running: list[Pass] = field(default_factory=list)
    passes: Counter[str] = field(default_factory=Counter)
    features: set[int] = field(default_factory=set)
    sights: list[Sight] = field(default_factory=list)
    _storages: list[tuple[Pass, StorageWeakRef]] = field(default_factory=list)
    _saved: list[tuple[Pass, weakref.ref[Saved]]] = field(default_factory=list)
    _nodes: list[tuple[Pass, weakref.ref[Mark]]] = field(default_factory=list)

    @contextmanager
    def on(self) -> Iterator[None]:
        with _Made(self), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    @contextmanager
    def inside(self, name: str, *, again: bool = False) -> Iterator[None]:
        """Around a forward of a node; ``again``: around more of the pass before."""
        self.passes[name] += not again
        self.running.append((name, self.passes[name]))
        try:
            yield
        finally:
            self.running.pop()

    def made(self, tensors: Sequence[Tensor]) -> None:
        """New tensors, whose storages were not there before."""
        if self.running:
            self._storages += [(self.running[-1], StorageWeakRef(t.untyped_storage())) for t in tensors]

    def returned(self, nest: Any) -> None:
        """What the running node hands on: the graph behind it, as far as that is new, is its own."""
        pending = [tensor.grad_fn for tensor in tensors_of(nest)]
        while pending:
            node = pending.pop()
            if node is not None and "mark" not in node.metadata and node.name() != "AccumulateGrad":
                node.metadata["mark"] = mark = Mark()
                self._nodes.append((self.running[-1], weakref.ref(mark)))
                pending += [following for following, _ in node.next_functions]

    def look(self) -> None:
        """Note what is alive now, during the forward of a head."""
        self.sights.append(Sight(self.running[-1][0], *map(frozenset, self.alive())))

    def alive(self) -> tuple[set[Pass], set[Pass], set[Pass], set[Pass]]:
        """The passes of which activations, inner activations, saved tensors and graph nodes are alive."""
        storages = [(made, ref.cdata) for made, ref in self._storages if not ref.expired()]
        return (
            {made for made, _ in storages},
            {made for made, storage in storages if storage not in self.features},
            {made for made, ref in self._saved if ref() is not None},
            {made for made, ref in self._nodes if ref() is not None},
        )

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if self.running:
            self._saved.append((self.running[-1], weakref.ref(saved)))
        return saved


class _Made(TorchDispatchMode):
    """Tells a watch of each tensor that an operation makes."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs), strict=False)}
        made = [t for t in tensors_of(result, strict=False) if t.untyped_storage()._cdata not in given]
        self.watch.made(made)
        return result


# --- a model that tells ------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A trunk or neck with activations inside of it; hands on a dict."""

    def __init__(self, watch: Watch, name: str) -> None:
        super().__init__()
        self.watch, self.name = watch, name
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 3), nn.Tanh())

    def forward(self, features: Any) -> dict[str, Any]:
        with self.watch.inside(self.name):
            x = features["x"] if isinstance(features, dict) else features
            output = self.layers(x)
            self.watch.features.add(output.untyped_storage()._cdata)
            self.watch.returned(output)
            return {"x": output, "n": 1}


class Layers(nn.Module):
    """A head that looks around before and after each of its layers."""

    def __init__(self, watch: Watch, name: str) -> None:
        super().__init__()
        self.watch, self.name = watch, name
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Sigmoid()])

    def forward(self, features: dict[str, Any]) -> Tensor:
        with self.watch.inside(self.name, again=True):  # also where it runs once more for its backward
            x = features["x"]
            for layer in self.layers:
                self.watch.look()
                x = layer(x)
            return x


class Telling(Task):
    """Tells of its forward, and of its loss as more of the same."""

    def __init__(self, watch: Watch, name: str, on: str) -> None:
        super().__init__(Layers(watch, name), None, on=on)
        self.watch, self.name = watch, name

    def forward(self, features: Any, batch: Any) -> Tensor:
        self.watch.passes[self.name] += 1
        return super().forward(features, batch)

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        with self.watch.inside(self.name, again=True):
            self.watch.look()
            loss = (prediction.exp() * prediction).mean()
            self.watch.returned(loss)
            self.watch.look()
            return loss


LAYERS = 4  # of a head, before each of which it looks around
HEADS = {"a": "trunk", "b": "neck", "c": "neck", "d": "trunk"}


def run(schedule: str, recompute: Sequence[str] = (), micro_batches: int = 2) -> Watch:
    """Run a window."""
    watch = Watch()
    torch.manual_seed(0)
    model = MultiTaskModel(
        Shared(watch, "trunk"),
        {name: Telling(watch, name, on) for name, on in HEADS.items()},
        inputs="x",
        necks={"neck": Neck(Shared(watch, "neck"))},
    )
    engine = Engine(model, schedule=schedule, recompute=recompute)
    window = [{"x": torch.rand(5, 3)} for _ in range(micro_batches)]
    with watch.on():
        engine.accumulate(window)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert {sight.head for sight in watch.sights} == set(HEADS)
    return watch


def nodes_of(passes: frozenset[Pass]) -> set[str]:
    return {name for name, _ in passes}


def one_pass_each(passes: frozenset[Pass]) -> bool:
    return len(passes) == len(nodes_of(passes))


# --- the tests --------------------------------------------------------------------------------------------

RECOMPUTES = [(), ("trunk",), ("trunk", "neck"), ("trunk", "neck", "b")]


@pytest.mark.parametrize("recompute", RECOMPUTES, ids="+".join)
@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_while_a_head_runs_nothing_of_another_one_is_alive_g2(
    schedule: str, recompute: tuple[str, ...]
) -> None:
    for sight in run(schedule, recompute).sights:
        path = {"trunk", HEADS[sight.head], sight.head}
        for alive in (sight.activations, sight.saved, sight.nodes):
            assert nodes_of(alive) <= path, sight
            assert one_pass_each(alive), f"of an earlier pass: {sight}"


@pytest.mark.parametrize("recompute", RECOMPUTES, ids="+".join)
@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_nothing_that_was_made_outlives_the_window_g2(schedule: str, recompute: tuple[str, ...]) -> None:
    assert run(schedule, recompute).alive() == (set(), set(), set(), set())


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_of_a_recomputed_trunk_only_the_features_are_alive_while_heads_run_g2(schedule: str) -> None:
    for sight in run(schedule, ("trunk",)).sights:
        own = {HEADS[sight.head], sight.head} - {"trunk"}
        assert nodes_of(sight.inner) <= own, sight
        assert nodes_of(sight.saved) <= own, sight


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_of_a_recomputed_neck_only_the_features_are_alive_while_its_heads_run_g2(schedule: str) -> None:
    for sight in run(schedule, ("trunk", "neck")).sights:
        assert nodes_of(sight.inner) <= {sight.head}, sight
        assert nodes_of(sight.saved) <= {sight.head}, sight


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_a_recomputed_head_keeps_nothing_until_its_loss_g2(schedule: str) -> None:
    def saved_when_the_loss_begins(*recompute: str) -> frozenset[Pass]:
        sights = [sight for sight in run(schedule, recompute, 1).sights if sight.head == "b"]
        return sights[LAYERS].saved

    assert ("b", 1) in saved_when_the_loss_begins()
    assert ("b", 1) not in saved_when_the_loss_begins("b")


# --- that the watch is not blind ---------------------------------------------------------------------------


def test_the_watch_sees_all_heads_in_summed_g2() -> None:
    watch = run("summed")
    last = watch.sights[-1]
    assert last.head == "d"
    for alive in (last.activations, last.inner, last.saved, last.nodes):
        assert alive == {(name, 2) for name in ("trunk", "neck", *HEADS)}


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_the_watch_sees_the_path_that_leads_to_a_head_g2(schedule: str) -> None:
    for sight in run(schedule).sights:
        shared = {"trunk", HEADS[sight.head]}
        for alive in (sight.activations, sight.inner, sight.saved, sight.nodes):
            assert nodes_of(alive) - {sight.head} == shared, sight


def test_the_trunk_is_recomputed_once_per_micro_batch_in_split_and_for_each_task_in_sequential() -> None:
    assert run("split", ("trunk",)).passes["trunk"] == 2 * 2
    assert run("sequential", ("trunk",)).passes["trunk"] == 2 * 2 * len(HEADS)
