"""What a window's plan becomes with what another rank has counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import plain_batch, plain_model

from mtaccum import Engine, InexactWarning, MultiTaskModel, Task, WindowPlan
from mtaccum.engine.inexact import Inexactness
from mtaccum.parallel import ALONE, Ranks


def plan(**counts: tuple[float, ...]) -> WindowPlan:
    return WindowPlan(counts, dict.fromkeys(counts, 1.0))


@dataclass(frozen=True)
class Beside(Ranks):
    """Two ranks, seen from the first one. The other one has the same tasks."""

    theirs: WindowPlan = field(default_factory=plan)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(numbers, self.theirs.local_totals.values(), strict=True)]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gather(self, value: Any) -> list[Any]:
        return [value, [self.theirs.active(index) for index in range(self.theirs.micro_batches)]]


def beside(theirs: WindowPlan) -> Beside:
    return Beside(0, 2, theirs=theirs)


def test_alone_a_plan_is_what_was_counted() -> None:
    own = plan(a=(1.0, 0.0))
    assert own.agreed(ALONE, together=True) is own
    assert (own.ranks, own.union, own.totals) == (1, None, {"a": 1})
    assert own.running(0) == ["a"]
    assert own.running(1) == own.active(2) == []


def test_labels_weigh_by_their_number_on_all_ranks_n2() -> None:
    own = plan(a=(1.0,), b=(0.0,)).agreed(beside(plan(a=(2.0, 1.0), b=(0.0, 5.0))))

    assert own.totals == {"a": 4, "b": 5}
    assert own.local_totals == {"a": 1, "b": 0}
    assert own.scale("a", 0) == 2 * 1 / 4  # gradients become their mean over two ranks
    assert own.union is None


def test_together_runs_what_any_rank_runs() -> None:
    own = plan(a=(1.0, 0.0), b=(0.0, 0.0), c=(0.0, 3.0))
    theirs = plan(a=(2.0, 0.0, 0.0), b=(0.0, 0.0, 1.0), c=(4.0, 0.0, 0.0))

    agreed = own.agreed(beside(theirs), together=True)

    assert agreed.union == (("a", "c"), ("c",), ("b",))
    assert [agreed.active(index) for index in range(4)] == [["a"], ["c"], [], []]
    assert [agreed.running(index) for index in range(3)] == [["a", "c"], ["c"], ["b"]]
    assert agreed.running(3) == []
    assert theirs.agreed(beside(own), together=True).union == agreed.union


def test_a_rank_without_a_batch_still_runs_the_others_tasks_d3() -> None:
    nothing = plan(a=(), b=())
    agreed = nothing.agreed(beside(plan(a=(0.0, 2.0), b=(1.0, 0.0))), together=True)

    assert agreed.union == (("b",), ("a",))
    assert agreed.totals == {"a": 2, "b": 1}
    assert agreed.local_totals == {"a": 0, "b": 0}
    assert agreed.micro_batches == 0


# --- what several ranks make inexact ----------------------------------------------------------------------


class Contrasting(Task):
    additive = False

    def loss(self, prediction: torch.Tensor, batch: Any) -> torch.Tensor:
        return prediction.std()


def said(model: MultiTaskModel, plan: WindowPlan) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Inexactness(model, freezes=False, repeats=False).warn(plan, stacklevel=1)
    assert {warning.category for warning in caught} <= {InexactWarning}
    return [str(warning.message) for warning in caught]


def test_one_micro_batch_on_each_of_several_ranks_is_a_part_too() -> None:
    head = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    trunk = torch.nn.Linear(3, 8)
    model = MultiTaskModel(trunk, {"a": Contrasting(head, "cls")}, inputs="x").double()
    own = Engine(model).plan([plain_batch(3)])

    assert said(model, own) == []
    first, second = said(model, own.agreed(beside(own)))
    assert "(additive = False): with the micro-batches of 2 ranks its gradient is not" in first
    assert "one of the micro-batches of 2 ranks, not by the whole batch: a.0." in second


def test_layers_that_the_ranks_synchronise_see_the_whole_batch() -> None:
    model = plain_model()
    model.task("other").head[1] = torch.nn.SyncBatchNorm(5)
    engine = Engine(model)
    own = engine.plan([plain_batch(3)])

    assert said(model, own.agreed(beside(own))) == []
    own = engine.plan([plain_batch(3)] * 2)
    assert "other.1." in said(model, own.agreed(beside(own)))[0]
