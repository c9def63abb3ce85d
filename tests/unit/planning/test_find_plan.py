"""find_plan: what it recommends fits when it is run for real, and is as exact as it says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close_gradients, joint_reference, seed_everything
from torch import Tensor, nn
from ways import Way

from mtaccum import (
    BudgetError,
    Classification,
    ConfigError,
    Engine,
    MultiTaskModel,
    Neck,
    PredictionError,
    Regression,
    Segmentation,
    StepOptions,
    find_plan,
    split_batch,
)
from mtaccum.memory import FakeTraining, measure_step
from mtaccum.planning import Plan, PlanReport
from mtaccum.planning.plan import EXACT

pytestmark = pytest.mark.filterwarnings("ignore::mtaccum.InexactWarning")


def block(channels: int, width: int, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), *more, nn.ReLU())


def dense(*more: Callable[[], nn.Module], heads: int = 2) -> MultiTaskModel:
    """A trunk of four blocks and dense heads; ``more`` stands in each block of the trunk."""
    trunk = nn.Sequential(*[block(3 if i == 0 else 8, 8, *(m() for m in more)) for i in range(4)])
    tasks = {
        f"seg{i}": Segmentation(4, head=nn.Sequential(block(8, 16), nn.Conv2d(16, 4, 1)), target="seg")
        for i in range(heads)
    }
    return MultiTaskModel(trunk, tasks, inputs="image")


def with_necks() -> MultiTaskModel:
    tasks = {
        "seg": Segmentation(4, head=block(8, 4), target="seg", on="fpn"),
        "cls": Classification(
            3, head=nn.Sequential(nn.Flatten(), nn.Linear(8 * 256, 3)), target="cls", on=("trunk", "fpn")
        ),
        "depth": Regression(dense=True, head=nn.Conv2d(8, 1, 1), target="depth", on="trunk"),
    }
    tasks["cls"].head = First(tasks["cls"].head)
    necks = {"fpn": Neck(nn.Sequential(block(8, 8), block(8, 8)))}
    return MultiTaskModel(nn.Sequential(block(3, 8), block(8, 8)), tasks, inputs="image", necks=necks)


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.inner(features[0] + features[1])
        return result


def attending() -> MultiTaskModel:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
    tasks = {
        "cls": Classification(3, head=nn.Sequential(nn.Flatten(), nn.Linear(16 * 48, 3)), target="cls"),
        "linear": Classification(3, head=nn.Sequential(nn.Flatten(), nn.Linear(16 * 48, 3)), target="cls"),
    }
    return MultiTaskModel(nn.Sequential(Rows(), *layers), tasks, inputs="image")


class Rows(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.reshape(len(image), 48, 16)


def independent() -> MultiTaskModel:
    tasks = {
        "seg": Segmentation(4, head=nn.Sequential(block(3, 8), block(8, 4)), target="seg"),
        "depth": Regression(dense=True, head=nn.Sequential(block(3, 4), nn.Conv2d(4, 1, 1)), target="depth"),
    }
    return MultiTaskModel(None, tasks, inputs="image")


MODELS: dict[str, Callable[[], MultiTaskModel]] = {
    "plain": dense,
    "batchnorm": lambda: dense(lambda: nn.BatchNorm2d(8)),
    "groupnorm": lambda: dense(lambda: nn.GroupNorm(2, 8), heads=3),
    "dropout": lambda: dense(lambda: nn.Dropout(0.1)),
    "one head": lambda: dense(heads=1),
    "necks": with_necks,
    "attention": attending,
    "independent": independent,
}


def batch(samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(samples, 3, 16, 16, generator=generator)
    return {
        "image": image,
        "seg": torch.randint(4, (samples, 16, 16), generator=generator),
        "cls": torch.randint(3, (samples,), generator=generator),
        "depth": image[:, :1].clone(),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def report_for(name: str, budget: int | str | None = None, **settings: Any) -> PlanReport:
    return find_plan(MODELS[name], batch(), budget_bytes=budget, build_optimizer=sgd, **settings)


def measured(build: Callable[[], MultiTaskModel], report: PlanReport) -> int:
    """The peak of a real step by the recommended plan, once the optimizer has its state."""
    plan = report.recommended
    assert plan is not None
    seed_everything(0)
    model = build()
    engine = Engine(model, sgd(model), options=plan.options)
    window = split_batch(batch(), plan.accumulate)
    engine.step(window)
    return measure_step(engine, window)[1].peak_bytes


def ways(*plans: Plan) -> list[Way]:
    return [Way(plan.options, plan.accumulate) for plan in plans]


@pytest.mark.parametrize("name", MODELS)
def test_recommended_plans_stay_within_their_budgets_when_they_are_run(name: str) -> None:
    generous = report_for(name)
    assert generous.recommended is not None
    assert generous.recommended.flops_over_summed == pytest.approx(1, abs=5e-4)
    smallest, largest = generous.smallest.peak_bytes, generous.recommended.peak_bytes
    assert smallest < largest
    budget = (smallest + largest) // 2
    report = report_for(name, budget)
    assert report.recommended is not None
    assert report.recommended.peak_bytes <= budget
    peak = measured(MODELS[name], report)
    assert peak <= 1.01 * budget
    assert peak == report.recommended.peak_bytes


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dropout"])
def test_a_plan_that_is_called_exact_has_the_gradients_of_the_whole_batch(name: str) -> None:
    generous = report_for(name)
    assert generous.recommended is not None
    exact = [plan for plan in generous.pareto_front if plan.exactness == 0]
    budget = min(plan.peak_bytes for plan in exact)
    report = report_for(name, budget)
    plan = report.recommended
    assert plan is not None
    assert plan.exactness == 0
    seed_everything(0)
    model = MODELS[name]().double()
    data = {key: v.double() if v.is_floating_point() else v for key, v in batch().items()}
    reference = joint_reference(copy.deepcopy(model), [data])
    Engine(model, options=plan.options).accumulate(split_batch(data, plan.accumulate))
    assert_close_gradients(model, reference, 1e-12)


def test_exact_levers_come_before_those_that_change_batches() -> None:
    generous = report_for("batchnorm")
    exact = [plan for plan in generous.pareto_front if plan.exactness == 0]
    inexact = [plan for plan in generous.pareto_front if plan.exactness == 2]
    assert exact
    assert inexact
    assert all(plan.accumulate == 1 for plan in exact)
    assert all("BatchNorm" in plan.why for plan in inexact)
    least = min(plan.peak_bytes for plan in exact)
    fits = report_for("batchnorm", least)
    assert fits.recommended is not None
    assert (fits.recommended.exactness, fits.recommended.accumulate) == (0, 1)
    below = report_for("batchnorm", least - 1)
    assert below.recommended is not None
    assert below.recommended.peak_bytes < least
    frozen = report_for("batchnorm", least - 1, batchnorm="freeze")
    assert frozen.recommended is not None
    assert frozen.recommended.exactness == 0


def test_other_dropout_masks_are_exact_in_distribution_only() -> None:
    several = [plan for plan in report_for("dropout").pareto_front if plan.accumulate > 1]
    assert several
    assert {plan.exactness for plan in several} == {1}
    assert "dropout" in several[0].why
    whole = [plan for plan in report_for("groupnorm").pareto_front if plan.accumulate > 1]
    assert {plan.exactness for plan in whole} == {0}


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "batchnorm"])
def test_a_budget_a_byte_below_gives_the_next_plan_or_says_how_little_can_do(name: str) -> None:
    smallest = report_for(name).smallest
    seen: list[int] = []
    budget: int | None = None
    while not seen or seen[-1] > smallest.peak_bytes:
        plan = report_for(name, budget).recommended
        assert plan is not None
        assert not seen or plan.peak_bytes < seen[-1]
        seen.append(plan.peak_bytes)
        # a byte below, or a good deal below, so that the way to the smallest is not too long
        budget = plan.peak_bytes - 1 if len(seen) % 2 else max(smallest.peak_bytes, plan.peak_bytes * 2 // 3)
    with pytest.raises(BudgetError) as refused:
        report_for(name, smallest.peak_bytes - 1)
    for words in (f"{smallest.peak_bytes:,} bytes", "activations", "parameters", "optimizer state"):
        assert words in str(refused.value)
    assert len(seen) > 2


def test_a_plan_is_the_same_every_time() -> None:
    one, other = report_for("groupnorm", "300KiB"), report_for("groupnorm", "300KiB")
    assert one.recommended is not None
    assert other.recommended is not None
    assert ways(one.recommended) == ways(other.recommended)
    assert ways(*one.pareto_front) == ways(*other.pareto_front)


def test_small_heads_share_a_backward_and_need_no_more_than_the_joint_one() -> None:
    def build() -> MultiTaskModel:
        trunk = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
        heads = {f"h{i}": Classification(3, head=nn.Linear(64, 3), target="y") for i in range(8)}
        return MultiTaskModel(trunk, heads, inputs="x")

    data = {"x": torch.randn(512, 64), "y": torch.randint(3, (512,))}
    summed = find_plan(build, data).schedules["summed"]
    grouped = FakeTraining(build, data).predict(StepOptions(head_groups=(tuple(f"h{i}" for i in range(8)),)))
    assert grouped.peak_bytes <= summed.peak_bytes
    plan = find_plan(build, data, budget_bytes=summed.peak_bytes * 3 // 4).recommended
    assert plan is not None
    assert plan.options.head_groups == (tuple(f"h{i}" for i in range(8)),)


def test_micro_batches_that_batchnorm_refuses_are_left_out() -> None:
    def build() -> MultiTaskModel:
        trunk = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
        return MultiTaskModel(trunk, {"a": Classification(3, head=nn.Linear(32, 3), target="y")}, inputs="x")

    report = find_plan(build, {"x": torch.randn(8, 8), "y": torch.randint(3, (8,))})
    assert max(plan.accumulate for plan in (*report.pareto_front, report.smallest)) == 4


def test_the_report_is_text_and_json() -> None:
    report = report_for("batchnorm", "400KiB")
    assert report.recommended is not None
    text = str(report)
    assert sum(line.startswith("->") for line in text.splitlines()) == 2
    assert f"engine={report.recommended.options.schedule}" in text
    values = json.loads(json.dumps(report.as_dict()))
    assert values["recommended"]["peak_bytes"] == report.recommended.peak_bytes
    assert sum(values["recommended"]["peak_by_kind"].values()) == report.recommended.peak_bytes
    assert values["budget"]["total_bytes"] == 400 * 2**10


def test_micro_batches_that_need_not_run_a_task_make_a_step_cheaper() -> None:
    """The neck of a task with labels in the first quarter of the batch."""

    def build() -> MultiTaskModel:
        neck = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
        tasks = {
            "seg": Segmentation(4, head=nn.Conv2d(32, 4, 1), on="neck"),
            "depth": Regression(dense=True, head=nn.Conv2d(8, 1, 1)),
        }
        return MultiTaskModel(
            nn.Conv2d(3, 8, 1), tasks, necks={"neck": Neck(neck, on="trunk")}, inputs="image"
        )

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    labels = torch.full((8, 16, 16), 255)
    labels[:2] = 1
    given = {"image": torch.rand(8, 3, 16, 16), "seg": labels, "depth": torch.rand(8, 1, 16, 16)}
    report = find_plan(build, given, budget_bytes="1GiB", build_optimizer=sgd)
    plan = report.recommended
    assert plan is not None
    assert (plan.options.schedule, plan.accumulate, plan.options.recompute) == ("split", 4, ())
    assert plan.flops_over_summed < 0.35
    # with less than that takes the micro-batches become smaller before anything runs twice
    smaller = find_plan(build, given, budget_bytes=plan.peak_bytes - 1, build_optimizer=sgd).recommended
    assert smaller is not None
    assert (smaller.accumulate, smaller.options.recompute) == (8, ())
    fits = report.schedules["split"].peak_bytes
    for one in (report, find_plan(build, given, budget_bytes=fits, build_optimizer=sgd)):
        fitting = [
            p for p in one.pareto_front if p.peak_bytes <= one.budget.tensor_bytes and p.exactness == EXACT
        ]
        assert one.recommended is not None
        assert one.recommended.rank == min(p.rank for p in fitting)


def test_an_absent_card_is_an_estimate_with_a_reserve() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    report = report_for("dropout", "2GiB", device="cuda")
    assert "An estimate for a CUDA card that isn't there" in str(report)
    assert report.budget.tensor_bytes == 2 * 2**30 - report.budget.reserve_bytes
    assert "in reserve" in str(report)
    assert any("dropout" in note for note in report.notes)
    assert any(plan.options.offload for plan in report.pareto_front)
    with pytest.raises(ConfigError, match="needed for a CUDA card that isn't there"):
        report_for("plain", device="cuda")


@pytest.mark.parametrize("budget", ["6GiBs", 0, -5, "-1GiB", "many", float("nan"), True, "", [1]])
def test_what_is_no_amount_of_memory_is_refused_with_what_is(budget: Any) -> None:
    with pytest.raises(ConfigError, match=r"no amount of memory. Valid is .*6GiB, 800MiB"):
        report_for("plain", budget)


def test_more_than_the_device_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than cpu has"):
        report_for("plain", "900TiB")


def test_what_cannot_be_predicted_is_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(48, 8, batch_first=True)

        def forward(self, image: Tensor) -> Tensor:
            output: Tensor = self.memory(image.flatten(2))[0]
            return output

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 3)

        def forward(self, features: Tensor) -> Tensor:
            result: Tensor = self.layer(features[features > 0][:, None]).mean(0).expand(len(features), 3)
            return result

    head = Classification(3, head=nn.Flatten(), target="cls")
    with pytest.raises(PredictionError, match=r"recurrent.*trunk\.memory"):
        find_plan(lambda: MultiTaskModel(Recurrent(), {"a": head}, inputs="image"), batch())
    with pytest.raises(PredictionError, match="values.*tasks.a"):
        find_plan(
            lambda: MultiTaskModel(
                nn.Conv2d(3, 3, 1), {"a": Classification(3, head=Chosen(), target="cls")}, inputs="image"
            ),
            batch(),
        )
