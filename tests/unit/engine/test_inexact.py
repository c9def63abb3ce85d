"""What is not exact is said once, by name, before it is trained on; where all is exact, nothing is said."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SCHEDULE_NAMES, Squared, awkward_batch, awkward_model, plain_batch, plain_model
from torch import Tensor, nn

from mtaccum import Engine, InexactWarning, MultiTaskModel, Neck

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)


def said_by(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings of a call, whatever the filters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


def layer(*after: nn.Module, inputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), *after)


def model_of(trunk: nn.Module, *, neck: nn.Module | None = None, **heads: nn.Module) -> MultiTaskModel:
    necks = {} if neck is None else {"neck": Neck(neck)}
    on = "trunk" if neck is None else "neck"
    tasks = {name: Squared(head, name, on=on) for name, head in heads.items()}
    return MultiTaskModel(trunk, tasks, inputs="x", necks=necks)


def window_of(*labels: str) -> list[dict[str, Any]]:
    """A micro-batch for each string, labelled for the tasks whose letters stand in it."""
    return [
        {"x": torch.rand(3, 4), **{task: torch.ones(3) if task in tasks else None for task in "abcd"}}
        for tasks in labels
    ]


# --- BatchNorm --------------------------------------------------------------------------------------------


@schedules
def test_batchnorm_with_several_micro_batches_is_one_warning_with_layers_and_choices_s4(
    schedule: str,
) -> None:
    model = awkward_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    window = [awkward_batch(2), awkward_batch(3)]

    first = said_by(lambda: engine.step(window))

    assert [warning.category for warning in first] == [InexactWarning]
    message = str(first[0].message)
    assert "one of 2 micro-batches" in message
    assert "trunk.norm, fpn.norm, depth.norm." in message
    for choice in ("batchnorm='freeze'", "GroupNorm", "larger micro-batches", "keep it"):
        assert choice in message
    assert said_by(lambda: engine.step(window)) == []
    assert said_by(lambda: engine.accumulate([*window, *window])) == []


def test_it_is_said_when_it_happens_first_not_when_the_engine_is_made_s4() -> None:
    engine = Engine(awkward_model())
    assert said_by(lambda: engine.accumulate([awkward_batch(3)])) == []
    assert len(said_by(lambda: engine.accumulate([awkward_batch(3)] * 2))) == 1


EXACT = {
    "group norm": nn.GroupNorm(1, 4),
    "layer norm": nn.LayerNorm(4),
    "evaluated": nn.BatchNorm1d(4).eval(),
    "dropout": nn.Dropout(0.5),
}


@pytest.mark.parametrize("kind", EXACT)
@schedules
def test_layers_that_do_not_couple_samples_are_not_warned_of_s4(schedule: str, kind: str) -> None:
    norm = EXACT[kind]
    model = model_of(layer(copy.deepcopy(norm)), a=layer(copy.deepcopy(norm)), b=layer())
    assert said_by(lambda: Engine(model, schedule=schedule).accumulate(window_of("ab", "ab"))) == []


@pytest.mark.parametrize(
    ("norm", "warned"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), True),
        (nn.SyncBatchNorm(4), True),
        (nn.BatchNorm1d(4).eval(), False),
    ],
    ids=["training", "without statistics", "sync", "evaluated"],
)
def test_what_normalises_by_what_it_sees_is_named_s4(norm: nn.Module, warned: bool) -> None:
    engine = Engine(model_of(layer(), a=layer(norm)))
    said = said_by(lambda: engine.accumulate(window_of("a", "a")))
    assert [": a.1. " in str(warning.message) for warning in said] == [True] * warned


def test_layers_that_do_not_run_are_not_named_s4() -> None:
    heads = {name: layer(nn.BatchNorm1d(4)) for name in "abcd"}
    model = model_of(layer(), **heads)
    model.task("b").mode = "off"
    model.task("c").weight = 0.0
    (said,) = said_by(lambda: Engine(model).accumulate(window_of("abc", "abc")))  # d has no labels
    assert "batch: a.1. " in str(said.message)


def test_many_layers_are_counted_s4() -> None:
    model = model_of(layer(), a=layer(*(nn.BatchNorm1d(4) for _ in range(8))))
    (said,) = said_by(lambda: Engine(model).accumulate(window_of("a", "a")))
    assert "batch: a.1, a.2, a.3, a.4, a.5 and 3 more. " in str(said.message)


def test_with_freeze_there_is_nothing_to_say_s4() -> None:
    engine = Engine(awkward_model(), batchnorm="freeze")
    assert said_by(lambda: engine.accumulate([awkward_batch(2), awkward_batch(3)])) == []


# --- frozen, but normalising by the batch -----------------------------------------------------------------


@pytest.mark.parametrize("node", ["trunk", "neck", "a"])
@schedules
def test_frozen_layers_in_training_mode_are_said_to_differ_from_evaluation_once(
    schedule: str, node: str
) -> None:
    def make() -> MultiTaskModel:
        return model_of(
            layer(nn.BatchNorm1d(4)), neck=layer(nn.BatchNorm1d(4)), a=layer(nn.BatchNorm1d(4)), b=layer()
        )

    model = make()
    module = model.own_modules()[node].requires_grad_(False)
    engine = Engine(model, schedule=schedule)
    (said,) = said_by(lambda: engine.accumulate(window_of("ab")))
    assert said.category is UserWarning, "its gradients are exact"
    assert str(said.message).startswith(f"{node} is frozen")
    assert f"normalise by the micro-batch: {node}.1. " in str(said.message)
    assert ".eval()" in str(said.message)
    assert said_by(lambda: engine.accumulate(window_of("ab"))) == []

    module.eval()
    assert said_by(lambda: Engine(model).accumulate(window_of("ab"))) == []
    module.train()
    assert said_by(lambda: Engine(model, batchnorm="freeze").accumulate(window_of("ab"))) == []


@pytest.mark.parametrize(("mode", "expected"), [("frozen", ["a is frozen"]), ("detached", []), ("off", [])])
def test_the_head_of_a_frozen_task_is_said_to_differ_too(mode: str, expected: list[str]) -> None:
    model = model_of(layer(), a=layer(nn.BatchNorm1d(4)), b=layer(nn.BatchNorm1d(4)))
    model.task("a").mode = mode
    said = said_by(lambda: Engine(model).accumulate(window_of("ab")))
    assert [str(warning.message).partition(", so")[0] for warning in said] == expected


def test_a_frozen_node_is_not_blamed_for_the_layers_of_another() -> None:
    # the name of one begins with that of the other
    model = model_of(layer(), a=layer(), ab=layer(nn.BatchNorm1d(4)))
    model.task("a").requires_grad_(False)
    batch = {"x": torch.rand(3, 4), "a": torch.ones(3), "ab": torch.ones(3)}
    assert said_by(lambda: Engine(model).accumulate([batch])) == []


def test_only_frozen_nodes_that_normalise_by_the_batch_are_named() -> None:
    model = model_of(layer(), a=layer(nn.BatchNorm1d(4)), b=layer())
    model.trunk.requires_grad_(False)
    model.task("a").requires_grad_(False)
    (said,) = said_by(lambda: Engine(model).accumulate(window_of("ab")))
    assert str(said.message).startswith("a is frozen")


# --- gradients added up in 16 bits ------------------------------------------------------------------------


def half_model(dtype: torch.dtype = torch.bfloat16) -> MultiTaskModel:
    model = model_of(layer(), a=layer(), b=layer())
    model.trunk.to(dtype)
    model.task("a").to(dtype)
    model.task("b").to(dtype)
    return model


def half_window(*labels: str, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    return [{**batch, "x": batch["x"].to(dtype)} for batch in window_of(*labels)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@schedules
def test_accumulating_in_16_bits_is_said_once(schedule: str, dtype: torch.dtype) -> None:
    engine = Engine(half_model(dtype), schedule=schedule)
    window = half_window("ab", "ab", dtype=dtype)
    (said,) = said_by(lambda: engine.accumulate(window))
    assert said.category is InexactWarning
    message = str(said.message)
    assert "16 bits" in message
    assert "trunk.0.weight, trunk.0.bias, tasks.a.head.0.weight, tasks.a.head.0.bias" in message
    assert "precision='bf16'" in message
    assert said_by(lambda: engine.accumulate(window)) == []


@pytest.mark.parametrize(("labels", "expected"), [("ab", 1), ("a", 0)])
def test_sequential_adds_up_a_gradient_per_task_too(labels: str, expected: int) -> None:
    said = said_by(lambda: Engine(half_model(), schedule="sequential").accumulate(half_window(labels)))
    assert len(said) == expected


@pytest.mark.parametrize("schedule", ["summed", "split"])
def test_with_one_micro_batch_nothing_is_added_up_in_16_bits(schedule: str) -> None:
    assert said_by(lambda: Engine(half_model(), schedule=schedule).accumulate(half_window("ab"))) == []


@schedules
def test_frozen_parameters_in_16_bits_are_no_matter(schedule: str) -> None:
    model = half_model()
    model.trunk.requires_grad_(False)
    model.task("a").float()
    model.task("b").requires_grad_(False)
    model.trunk.float()
    assert said_by(lambda: Engine(model, schedule=schedule).accumulate(window_of("a", "a"))) == []


@schedules
def test_autocast_keeps_gradients_in_32_bits_and_says_nothing(schedule: str) -> None:
    model = model_of(layer(), a=layer(), b=layer())
    engine = Engine(model, schedule=schedule, precision="bf16")
    assert said_by(lambda: engine.accumulate(window_of("ab", "ab"))) == []


# --- losses that are no means, and all of it together -----------------------------------------------------


class Dice(Squared):
    additive = False


def test_losses_that_are_no_means_are_named_l7() -> None:
    tasks = {"a": Squared(layer(), "a"), "dice": Dice(layer(), "a"), "off": Dice(layer(), "a", mode="off")}
    model = MultiTaskModel(layer(), tasks, inputs="x")
    engine = Engine(model)
    assert said_by(lambda: engine.accumulate(window_of("a"))) == []
    (said,) = said_by(lambda: engine.accumulate(window_of("a", "a", "a")))
    assert said.category is InexactWarning
    assert "the loss of dice is not a mean over labels (additive = False): with 3" in str(said.message)


def test_each_kind_is_said_once_and_hides_no_other() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.bfloat16()).float()

    tasks = {"a": Squared(layer(nn.BatchNorm1d(4)), "a"), "dice": Dice(Cast(), "a")}
    model = MultiTaskModel(layer(nn.BatchNorm1d(4)).requires_grad_(False), tasks, inputs="x")
    engine = Engine(model)
    (said,) = said_by(lambda: engine.accumulate(window_of("a")))
    assert str(said.message).startswith("trunk is frozen")
    rest = [str(warning.message) for warning in said_by(lambda: engine.accumulate(window_of("a", "a")))]
    assert len(rest) == 3
    for start in ("the loss of dice", "gradients of parameters in 16 bits", "BatchNorm normalises"):
        assert sum(message.startswith(start) for message in rest) == 1
    assert said_by(lambda: engine.accumulate(window_of("a", "a"))) == []
    assert len(said_by(lambda: Engine(model).accumulate(window_of("a", "a")))) == 4, "another engine, again"


@pytest.mark.parametrize("how", ["step", "accumulate"])
def test_the_warning_points_to_the_line_that_calls_the_engine_s4(how: str) -> None:
    model = awkward_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    window = [awkward_batch(2), awkward_batch(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(window) if how == "step" else engine.accumulate(window)
    with open(__file__, encoding="utf-8") as file:
        line = file.read().splitlines()[caught[0].lineno - 1]
    assert caught[0].filename == __file__
    assert "engine.step(window) if" in line


@schedules
def test_a_plain_model_is_exact_and_nothing_is_said(schedule: str) -> None:
    model = plain_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    assert said_by(lambda: engine.step([plain_batch(3), plain_batch(5)])) == []


def test_an_inexact_warning_can_be_made_an_error() -> None:
    assert issubclass(InexactWarning, UserWarning)
    model = MultiTaskModel(layer(), {"a": Dice(layer(), "a")}, inputs="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactWarning)
        with pytest.raises(InexactWarning):
            Engine(model).accumulate(window_of("a", "a"))
    assert all(parameter.grad is None for parameter in model.parameters())
