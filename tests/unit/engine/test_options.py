"""The options of a step: their checks, what goes together, and what it takes to add one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Squared
from torch import nn

from mtaccum import ConfigError, Engine, MultiTaskModel, StepOptions
from mtaccum.engine import levers, options
from mtaccum.engine.lever import Lever
from mtaccum.engine.option_values import positive_or_none
from mtaccum.engine.options import CONFLICTS, EXAMPLES, compatibility, option
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.parallel import KINDS

SAMPLES = {"x": torch.rand(4, 3), "a": torch.rand(4, 2), "b": torch.rand(4, 2)}


def small_model() -> MultiTaskModel:
    """A trunk, and two heads in one head group if asked for."""
    torch.manual_seed(0)
    heads = {name: Squared(nn.Linear(3, 2), name) for name in ("a", "b")}
    return MultiTaskModel(nn.Linear(3, 3), heads, inputs="x")


def small_engine(**given: Any) -> Engine:
    model = small_model()
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


# --- values -----------------------------------------------------------------------------------------------


WRONG = {
    "schedule": "splitt",
    "max_grad_norm": 0,
    "precision": "fp8",
    "on_nonfinite": "ignore",
    "max_skipped": 0,
    "batchnorm": "frozen",
    "recompute": "trunk",
    "compile": "yes",
    "head_groups": [["a"]],
    "chunks": {"a": 0},
    "offload": 1,
    "comm_hook": "fp8",
}


@pytest.mark.parametrize(("name", "value"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    for make in (StepOptions, small_engine):
        with pytest.raises(ConfigError, match=name):
            make(**{name: value})


def test_every_option_has_a_wrong_value_above() -> None:
    assert set(WRONG) == set(StepOptions.__dataclass_fields__)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option of a step 'groups'\. Did you mean 'head_groups'\?"
    ):
        small_engine(groups=[["a", "b"]])


def test_options_are_values() -> None:
    given = StepOptions(recompute=["trunk"], head_groups=[["a", "b"]], chunks={"c": 2}, compile={"mode": "x"})
    same = StepOptions(
        recompute=("trunk",), head_groups=(("a", "b"),), chunks={"c": 2}, compile={"mode": "x"}
    )
    assert given == same
    assert hash(given) == hash(same)
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given
    assert given != given.changed({"chunks": {"c": 3}})
    with pytest.raises(TypeError, match="frozen"):
        given.chunks["c"] = 3  # type: ignore[index]
    for change in ("update", "pop", "clear", "setdefault", "popitem"):
        with pytest.raises(TypeError, match="frozen"):
            getattr(given.chunks, change)("c")


def test_what_is_given_is_plain() -> None:
    given = StepOptions(recompute=["trunk"], chunks={"c": 2}, max_grad_norm=1.0)
    assert given.given() == {"recompute": ["trunk"], "chunks": {"c": 2}, "max_grad_norm": 1.0}
    assert StepOptions().given() == {}
    assert StepOptions(**given.given()) == given


def test_single_options_go_before_those_given_together() -> None:
    engine = small_engine(options=StepOptions(schedule="summed", max_grad_norm=1.0), schedule="sequential")
    assert engine.options == StepOptions(schedule="sequential", max_grad_norm=1.0)


# --- what goes together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "schedule", "_", "reason"), compatibility({"none": KINDS["none"]}))
def test_a_cell_of_the_table_is_what_happens_in_a_single_process(
    name: str, schedule: str, _: str, reason: str | None
) -> None:
    """Where the table says that it works, a step runs, or is refused for the device by name; else it is
    refused with the table's reason. Several ranks have tests of their own."""
    example = {"schedule": schedule, **EXAMPLES[name]}
    if reason is not None:
        with pytest.raises(ConfigError) as refused:
            small_engine(**example)
        assert str(refused.value) == reason
    elif name == "offload":
        with pytest.raises(ConfigError, match=r"offload keeps .* of a CUDA device"):
            small_engine(**example)
    else:
        without_effect = name in ("batchnorm=sync", "comm_hook=fp16")
        with pytest.warns(UserWarning, match="process") if without_effect else _nothing():
            engine = small_engine(**example)
        # a new loss scale may be too large at first
        assert any(engine.step([SAMPLES]).stepped for _ in range(20))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_the_table_names_a_reason_and_a_way_out_for_each_kind() -> None:
    table = {(name, schedule, kind): reason for name, schedule, kind, reason in compatibility(KINDS)}
    assert len(table) == len(EXAMPLES) * 3 * 3
    assert "schedule='split'" in str(table["chunks", "sequential", "none"])
    assert "no effect" in str(table["head_groups", "summed", "ddp"])
    assert "parallel=ddp" in str(table["compile", "split", "fsdp"])
    assert table["recompute", "split", "fsdp"] is None


# --- a new lever: one field, one check, one place ---------------------------------------------------------


@dataclass(frozen=True)
class ToyOptions(StepOptions):
    """An option that makes gradients louder."""

    loudness: float | None = option(None, positive_or_none)


class Loudness(Lever):
    """Multiplies each gradient that arrives at a parameter."""

    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None:
        self._model = model
        self._factor = options.loudness if isinstance(options, ToyOptions) else None

    @contextmanager
    def running(self, counts: WindowCounts) -> Iterator[None]:
        factor = self._factor or 1.0
        hooks = [p.register_hook(lambda gradient: gradient * factor) for p in self._model.parameters()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _silent_when_summed(options: StepOptions) -> str | None:
    loud = isinstance(options, ToyOptions) and options.loudness is not None
    return "loudness is heard under other schedules only." if loud and options.schedule == "summed" else None


def test_a_toy_lever_is_a_field_a_check_and_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levers, "LEVERS", [*levers.LEVERS, Loudness])
    monkeypatch.setattr(options, "CONFLICTS", [*CONFLICTS, _silent_when_summed])
    plain, loud = small_model(), small_model()
    Engine(plain).accumulate([SAMPLES])
    Engine(loud, options=ToyOptions(), loudness=3.0).accumulate([SAMPLES])
    for ours, theirs in zip(loud.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, 3 * theirs.grad)
    with pytest.raises(ConfigError, match="loudness must be a finite number above 0"):
        ToyOptions(loudness=-1.0)
    with pytest.raises(ConfigError, match="other schedules only"):
        ToyOptions(schedule="summed", loudness=2.0)
