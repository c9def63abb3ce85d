"""What a window's label counts become with what another rank has counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from helpers import Squared, plain_batch, plain_model
from torch import nn

from mtaccum import ConfigError, Engine, InexactWarning, LabelCounts, MultiTaskModel, StepOptions, Task
from mtaccum.engine.notices import Notices
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.parallel import DDP, FSDP, Collectives, SingleProcess
from mtaccum.parallel.lockstep import active_in


def labels(**counts: tuple[float, ...]) -> LabelCounts:
    return LabelCounts(counts)


def tasks(*names: str, weight: float = 1.0) -> MultiTaskModel:
    made = {name: Squared(nn.Linear(3, 1), weight=weight) for name in names}
    return MultiTaskModel(nn.Identity(), made, inputs="x")


@dataclass(frozen=True)
class Beside(Collectives):
    """Two ranks, seen from rank 0. The other one has the same tasks."""

    theirs: LabelCounts = field(default_factory=labels)

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(numbers, self.theirs.totals.values(), strict=True)]

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, [list(names) for names in self.theirs.active]]


def beside(theirs: LabelCounts) -> Beside:
    return Beside(0, 2, theirs=theirs)


def apart(own: LabelCounts, theirs: LabelCounts, weight: float = 1.0) -> WindowCounts:
    """Where each rank runs its own tasks."""
    return WindowCounts.agreed(own, tasks(*own.counts, weight=weight), DDP(beside(theirs)))


def lockstep(own: LabelCounts, theirs: LabelCounts) -> WindowCounts:
    """Where each rank runs what any rank runs."""
    model = tasks(*own.counts)
    return WindowCounts.agreed(own, model, FSDP(model, beside(theirs)))


def test_a_single_process_knows_what_it_has_counted() -> None:
    own = labels(a=(1.0, 0.0))
    agreed = WindowCounts.agreed(own, tasks("a", weight=3.0), SingleProcess())

    assert agreed.labels is own
    assert (agreed.loss_factor, agreed.totals, agreed.weights) == (1, {"a": 1}, {"a": 3})
    assert agreed.running == (("a",), ())
    assert own.active_in(1) == own.active_in(2) == ()
    assert agreed.scale("a", 0) == 3


def test_labels_weigh_by_their_number_on_all_ranks_n2() -> None:
    agreed = apart(labels(a=(1.0,), b=(0.0,)), labels(a=(2.0, 1.0), b=(0.0, 5.0)), weight=3.0)

    assert agreed.totals == {"a": 4, "b": 5}
    assert agreed.labels.totals == {"a": 1, "b": 0}
    assert agreed.loss_factor == 2  # gradients become their mean over two ranks
    assert agreed.scale("a", 0) == 2 * 3 * 1 / 4
    assert agreed.running == agreed.labels.active == (("a",),)


def test_ranks_that_add_gradients_up_need_no_factor() -> None:
    class Adding(DDP):
        averages: ClassVar[bool] = False

    own, theirs = labels(a=(1.0,)), labels(a=(3.0,))
    agreed = WindowCounts.agreed(own, tasks("a"), Adding(beside(theirs)))

    assert agreed.loss_factor == 1
    assert agreed.scale("a", 0) == 1 / 4


def test_ranks_that_train_other_tasks_are_refused() -> None:
    class Other(Beside):
        def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
            return [max(a, b) for a, b in zip(numbers, (0.0, 0.0), strict=True)]

        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, "b (weight 2.0)"]

    with pytest.raises(ConfigError, match=r"rank 0: a \(weight 1\.0\); rank 1: b \(weight 2\.0\)\."):
        WindowCounts.agreed(labels(a=(1.0,)), tasks("a"), DDP(Other(0, 2)))


def test_in_lockstep_runs_what_any_rank_runs() -> None:
    own = labels(a=(1.0, 0.0), b=(0.0, 0.0), c=(0.0, 3.0))
    theirs = labels(a=(2.0, 0.0, 0.0), b=(0.0, 0.0, 1.0), c=(4.0, 0.0, 0.0))

    agreed = lockstep(own, theirs)

    assert agreed.running == (("a", "c"), ("c",), ("b",))
    for active in (agreed.labels.active_in, lambda index: active_in(agreed.agreement, index)):
        assert [active(index) for index in range(4)] == [("a",), ("c",), (), ()]
    assert lockstep(theirs, own).running == agreed.running


def test_a_rank_without_a_batch_still_runs_the_others_tasks_d3() -> None:
    agreed = lockstep(labels(a=(), b=()), labels(a=(0.0, 2.0), b=(1.0, 0.0)))

    assert agreed.running == (("b",), ("a",))
    assert agreed.totals == {"a": 2, "b": 1}
    assert agreed.labels.totals == {"a": 0, "b": 0}
    assert agreed.labels.micro_batches == 0


# --- what several ranks make inexact ----------------------------------------------------------------------


class Contrasting(Task):
    additive = False

    def loss(self, prediction: torch.Tensor, batch: Any) -> torch.Tensor:
        return prediction.std()


def said(model: MultiTaskModel, own: LabelCounts, *, ranks: int = 1) -> list[str]:
    """What is warned of, where the other rank has the same labels."""
    several = SingleProcess() if ranks == 1 else DDP(beside(own))
    assert several.world_size == ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Notices(model, StepOptions(), several).before([], WindowCounts.agreed(own, model, several))
    assert {warning.category for warning in caught} <= {InexactWarning}
    return [str(warning.message) for warning in caught]


def test_one_micro_batch_on_each_of_several_ranks_is_one_of_several_too() -> None:
    head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
    trunk = nn.Linear(3, 8)
    model = MultiTaskModel(trunk, {"a": Contrasting(head, "cls")}, inputs="x").double()
    own = Engine(model).count_labels([plain_batch(3)])

    assert said(model, own) == []
    first, second = said(model, own, ranks=2)
    assert "(additive = False): with the micro-batches of 2 ranks its gradient is not" in first
    assert "one of the micro-batches of 2 ranks, not by the whole batch: a.0." in second


def test_layers_that_the_ranks_synchronise_see_the_whole_batch() -> None:
    model = plain_model()
    model.task("other").head[1] = nn.SyncBatchNorm(5)
    engine = Engine(model)
    own = engine.count_labels([plain_batch(3)])

    assert said(model, own, ranks=2) == []
    own = engine.count_labels([plain_batch(3)] * 2)
    assert "other.1." in said(model, own, ranks=2)[0]
