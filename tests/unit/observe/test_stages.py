"""Stages: observers hear what a step is doing, in order, also where it fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import Failing, Squared
from torch import Tensor, nn

from mtaccum import Engine, MultiTaskModel, Neck, TaskError, sequential_backward, split_backward
from mtaccum.observe import observing, stage


@dataclass
class Heard:
    """What an observer is told; ``>`` begins, ``<`` ends, and ``cut`` with the number of its leaves."""

    events: list[str] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)

    def begins(self, node: str, phase: str) -> None:
        self.events.append(f"{node} {phase} >")

    def ends(self, node: str, phase: str) -> None:
        self.events.append(f"{node} {phase} <")

    def cut(self, leaves: Sequence[Tensor]) -> None:
        self.events.append(f"cut {len(leaves)}")
        self.leaves += leaves


def both(*stages: str) -> list[str]:
    """Stages that begin and end one after the other."""
    return [text for name in stages for text in ([name] if "cut" in name else [f"{name} >", f"{name} <"])]


class Two(nn.Module):
    """Features of two tensors with a graph and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": self.layer(x), "b": self.layer(x).tanh(), "x": x}


class Take(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: dict[str, Any]) -> Tensor:
        return self.layer(features["a"] + features["b"])


def small_model() -> MultiTaskModel:
    """trunk -- neck -- a and b; c on the trunk."""
    torch.manual_seed(0)
    return MultiTaskModel(
        Two(),
        {
            "a": Squared(nn.Linear(4, 1), on="neck"),
            "b": Squared(nn.Linear(4, 1), on="neck"),
            "c": Squared(Take()),
        },
        necks={"neck": Neck(Take())},
        inputs="x",
    )


def batch() -> dict[str, Tensor]:
    return {"x": torch.rand(4, 3)}


def heard(schedule: str, **settings: Any) -> list[str]:
    observer = Heard()
    with observing(observer):
        Engine(small_model(), schedule=schedule, **settings).accumulate([batch()])
    return observer.events


def test_split_runs_a_node_cuts_it_and_goes_back_after_its_children() -> None:
    assert heard("split") == both(
        *("trunk forward", "cut 2", "neck forward", "cut 1"),
        *("a forward", "a backward", "b forward", "b backward", "neck backward"),
        *("c forward", "c backward", "trunk backward"),
    )


def test_sequential_runs_each_path_and_its_backward_is_the_heads() -> None:
    assert heard("sequential") == both(
        *("trunk forward", "neck forward", "a forward", "a backward"),
        *("trunk forward", "neck forward", "b forward", "b backward"),
        *("trunk forward", "c forward", "c backward"),
    )


def test_summed_has_one_backward_of_all_tasks() -> None:
    assert heard("summed") == both(
        *("trunk forward", "neck forward", "a forward", "b forward", "c forward", "all tasks backward")
    )


def test_a_head_group_is_one_stage_by_the_names_of_its_tasks() -> None:
    assert heard("split", head_groups=[["b", "a"]]) == both(
        *("trunk forward", "cut 2", "neck forward", "cut 1", "a+b forward", "a+b backward", "neck backward"),
        *("c forward", "c backward", "trunk backward"),
    )
    assert heard("sequential", head_groups=[["b", "a"]]) == both(
        *("trunk forward", "neck forward", "a+b forward", "a+b backward"),
        *("trunk forward", "c forward", "c backward"),
    )


def test_each_chunk_is_a_stage_of_its_task() -> None:
    assert heard("split", chunks={"b": 3}) == both(
        *("trunk forward", "cut 2", "neck forward", "cut 1", "a forward", "a backward"),
        *(["b forward", "b backward"] * 3),
        *("neck backward", "c forward", "c backward", "trunk backward"),
    )


def test_the_optimizers_step_is_a_stage() -> None:
    model, observer = small_model(), Heard()
    with observing(observer):
        Engine(model, torch.optim.SGD(model.parameters())).step([batch(), batch()])
    assert observer.events[-2:] == ["optimizer step >", "optimizer step <"]
    assert observer.events.count("trunk backward <") == 2


@pytest.mark.parametrize("function", ["split", "sequential"])
def test_the_functions_say_their_stages_too(function: str) -> None:
    torch.manual_seed(0)
    layer, heads, observer = nn.Linear(3, 4), [nn.Linear(4, 1), nn.Linear(4, 1)], Heard()
    features = layer(torch.rand(2, 3))
    with observing(observer):
        if function == "split":
            split_backward(features, {"a": lambda f: heads[0](f).sum(), "b": lambda f: heads[1](f).sum()})
        else:
            sequential_backward({"a": lambda: layer(torch.rand(2, 3)).sum(), "b": lambda: layer.bias.sum()})
    tasks = both("a forward", "a backward", "b forward", "b backward")
    cut = [*both("features forward"), "cut 1"]
    assert observer.events == ([*cut, *tasks, *both("features backward")] if function == "split" else tasks)


@pytest.mark.filterwarnings("ignore:no gradient reached")
def test_a_constant_loss_has_no_backward() -> None:
    class Constant(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return torch.tensor(3.0)

    observer = Heard()
    model = MultiTaskModel(nn.Linear(3, 2), {"zero": Constant(nn.Identity())}, inputs="x")
    with observing(observer):
        Engine(model).accumulate([batch()])
    assert observer.events == both("trunk forward", "cut 1", "zero forward", "trunk backward")


def test_the_leaves_of_a_cut_are_what_collects_the_gradients_and_are_not_kept() -> None:
    class Watcher(Heard):
        def cut(self, leaves: Sequence[Tensor]) -> None:
            super().cut(leaves)
            assert all(leaf.is_leaf and leaf.requires_grad and leaf.grad is None for leaf in leaves)

        def begins(self, node: str, phase: str) -> None:
            super().begins(node, phase)
            if (node, phase) == ("trunk", "backward"):
                assert [leaf.grad is not None for leaf in self.leaves] == [True, True, True]

    observer = Watcher()
    with observing(observer):
        Engine(small_model()).accumulate([batch()])
    assert observer.events.count("cut 2") == 1
    alive = [weakref.ref(leaf) for leaf in observer.leaves]
    observer.leaves.clear()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["split", "sequential", "summed"])
def test_what_begins_ends_also_where_it_fails(schedule: str, place: str) -> None:
    def fail(loss: Tensor) -> None:
        raise TaskError("broken")

    model, observer = small_model(), Heard()
    settings = {"backward": fail} if place == "backward" else {}
    if place == "forward":
        model.task("b").head = Failing(model.task("b").head, RuntimeError("broken"))
    engine = Engine(model, schedule=schedule, **settings)
    with observing(observer), pytest.raises(TaskError, match="broken"):
        engine.accumulate([batch()])
    begun = [event[:-2] for event in observer.events if event.endswith(">")]
    ended = [event[:-2] for event in observer.events if event.endswith("<")]
    assert begun == ended
    name = {"summed": "all tasks", "split": "a", "sequential": "a"}[schedule]
    assert begun[-1] == ("b forward" if place == "forward" else f"{name} backward")


def test_several_observers_hear_the_same_each_as_long_as_it_observes() -> None:
    # equal as values, since they have heard the same
    one, other, engine = Heard(), Heard(), Engine(small_model())
    with observing(one):
        with observing(other):
            engine.accumulate([batch()])
        assert one.events == other.events != []
        engine.accumulate([batch()])
    assert one.events == 2 * other.events
    engine.accumulate([batch()])
    assert one.events == 2 * other.events


def test_of_observers_that_equal_each_other_the_right_one_leaves() -> None:
    heard = [Heard(), Heard()]
    for leaver, stayer in ((0, 1), (1, 0)):
        leaving, staying = observing(heard[leaver]), observing(heard[stayer])
        leaving.__enter__()
        staying.__enter__()
        leaving.__exit__(None, None, None)
        with stage("trunk", "forward"):
            pass
        staying.__exit__(None, None, None)
        assert heard[leaver].events == []
        assert heard[stayer].events == both("trunk forward")
        heard[stayer].events.clear()


def test_an_observer_leaves_also_after_an_error() -> None:
    observer = Heard()
    with pytest.raises(KeyError), observing(observer):
        raise KeyError
    with stage("trunk", "forward"):
        pass
    assert observer.events == []


def test_who_comes_within_a_stage_does_not_hear_its_end_and_who_leaves_within_one_does() -> None:
    late, early = Heard(), Heard()
    leaving = observing(early)
    leaving.__enter__()
    with stage("trunk", "forward"):
        leaving.__exit__(None, None, None)
        coming = observing(late)
        coming.__enter__()
    coming.__exit__(None, None, None)
    assert early.events == both("trunk forward")
    assert late.events == []
