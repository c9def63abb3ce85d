"""Plans over sweeps of budgets, against real steps, real gradients, and all other ways of running a step."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import Scored
from helpers import Squared, assert_close_gradients, joint_reference, seed_everything
from torch import Tensor, nn
from ways import Way, way_of

from mtaccum import (
    BatchError,
    BudgetError,
    Classification,
    Engine,
    MtaccumError,
    MultiTaskModel,
    Neck,
    Regression,
    Segmentation,
    StepOptions,
    find_plan,
    split_batch,
)
from mtaccum.config import RunConfig, run_command
from mtaccum.memory import FakeTraining, Prediction, measure_step
from mtaccum.memory.predict import FlopTracker
from mtaccum.planning import PLANNED, Budget, Plan, PlanReport, plan_training, planner
from mtaccum.planning.watcher import Profile, profile_of
from mtaccum.torch_internals import running_graph_node

pytestmark = pytest.mark.filterwarnings("ignore::mtaccum.InexactWarning")

SAMPLES, SIZE = 4, 10
BuildModel = Callable[[], MultiTaskModel]


# --- models ------------------------------------------------------------------------------------------------


def block(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), *more, nn.ReLU())


def shared(*more: Callable[[], nn.Module], blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*[block(3 if i == 0 else 6, 6, *(make() for make in more)) for i in range(blocks)])


def dense_head(width: int, classes: int, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(block(6, width, *more), nn.Conv2d(width, classes, 1))


def pooled(inputs: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 3))


def tasks(width: int, *more: Callable[[], nn.Module], **settings: Any) -> dict[str, Any]:
    def head(classes: int) -> nn.Module:
        return dense_head(width, classes, *(make() for make in more))

    return {
        "seg": Segmentation(4, head=head(4), target="seg", **settings),
        "depth": Regression(dense=True, head=head(1), target="depth", **settings),
        "cls": Classification(3, head=pooled(), target="cls"),
        "number": Classification(3, head=pooled(), target="number"),
    }


class NotAMean(Squared):
    """A loss that isn't a mean over labels."""

    additive = False


def attending(dropout: float) -> MultiTaskModel:
    layers = [nn.TransformerEncoderLayer(12, 2, 24, dropout=dropout, batch_first=True) for _ in range(2)]
    rows = nn.Sequential(nn.Flatten(2), nn.Linear(SIZE * SIZE, 12), *layers)
    heads = {"a": Scored(nn.Linear(12, 3)), "b": Scored(nn.Sequential(nn.Linear(12, 96), nn.GELU()))}
    return MultiTaskModel(rows, heads, inputs="image")


def words() -> MultiTaskModel:
    """A head with large logits on a small trunk."""

    def loss(prediction: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(prediction.flatten(0, 2), batch["word"].flatten())

    heads = {"lm": Scored(nn.Linear(6, 60), loss), "b": Scored(nn.Linear(6, 2))}
    return MultiTaskModel(nn.Sequential(nn.Linear(SIZE, 6), nn.GELU()), heads, inputs="image")


def linear() -> MultiTaskModel:
    trunk = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU()
    )
    heads = {f"t{i}": Regression(1, head=nn.Linear(32, 1), target="value") for i in range(6)}
    return MultiTaskModel(trunk, heads, inputs="image")


def with_neck() -> MultiTaskModel:
    made = tasks(6)
    for name in ("seg", "depth"):
        made[name].on = ("fpn",)
    return MultiTaskModel(shared(blocks=2), made, inputs="image", necks={"fpn": Neck(block(6, 6))})


def independent() -> MultiTaskModel:
    def whole(classes: int) -> nn.Sequential:
        return nn.Sequential(block(3, 6), block(6, 6), nn.Conv2d(6, classes, 1))

    heads = {
        "seg": Segmentation(4, head=whole(4), target="seg"),
        "depth": Regression(dense=True, head=whole(1), target="depth"),
    }
    return MultiTaskModel(None, heads, inputs="image")


def norm() -> nn.Module:
    return nn.BatchNorm2d(6)


def group_norm() -> nn.Module:
    return nn.GroupNorm(2, 6)


def drop() -> nn.Module:
    return nn.Dropout(0.2)


def not_additive() -> MultiTaskModel:
    return MultiTaskModel(shared(), {"a": NotAMean(dense_head(6, 2)), **tasks(6)}, inputs="image")


def modes() -> MultiTaskModel:
    made = tasks(6)
    made["seg"].mode, made["depth"].mode, made["number"].mode = "detached", "frozen", "off"
    return MultiTaskModel(shared(), made, inputs="image")


def spectral() -> MultiTaskModel:
    made = tasks(6)
    nn.utils.parametrizations.spectral_norm(made["seg"].head[1])
    return MultiTaskModel(shared(), made, inputs="image")


MODELS: dict[str, BuildModel] = {
    "heavy trunk": lambda: MultiTaskModel(shared(blocks=5), tasks(4), inputs="image"),
    "heavy heads": lambda: MultiTaskModel(shared(group_norm), tasks(20), inputs="image"),
    "batchnorm everywhere": lambda: MultiTaskModel(shared(norm), tasks(6, norm), inputs="image"),
    "batchnorm in the trunk": lambda: MultiTaskModel(shared(norm), tasks(16), inputs="image"),
    "dropout everywhere": lambda: MultiTaskModel(shared(drop), tasks(6, drop), inputs="image"),
    "dropout in heads": lambda: MultiTaskModel(shared(), tasks(16, drop), inputs="image"),
    "a neck": with_neck,
    "no trunk": independent,
    "linear heads": linear,
    "large logits": words,
    "attention": lambda: attending(0.0),
    "attention with dropout": lambda: attending(0.1),
    "not additive": not_additive,
    "modes": modes,
    "spectral norm": spectral,
}


def build_of(name: str) -> BuildModel:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        return MODELS[name]().double()

    return build


def batch_of(samples: int = SAMPLES) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(1)
    return {
        "image": torch.rand(samples, 3, SIZE, SIZE, generator=numbers, dtype=torch.float64),
        "seg": torch.randint(4, (samples, SIZE, SIZE), generator=numbers),
        "depth": torch.rand(samples, 1, SIZE, SIZE, generator=numbers, dtype=torch.float64),
        "cls": torch.randint(3, (samples,), generator=numbers),
        "number": torch.randint(3, (samples,), generator=numbers),
        "value": torch.rand(samples, 1, generator=numbers, dtype=torch.float64),
        "word": torch.randint(60, (samples, 3, SIZE), generator=numbers),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Remembering(FakeTraining):
    """Predicts each way of running a step once, so that many budgets can be tried."""

    def predict(
        self,
        options: StepOptions | None = None,
        accumulate: int = 1,
        *,
        timeline: bool = False,
        make_tracker: Callable[..., FlopTracker] = FlopTracker,
    ) -> Prediction:
        if make_tracker is not FlopTracker:
            return super().predict(options, accumulate, timeline=timeline, make_tracker=make_tracker)
        known: dict[Way, Prediction | MtaccumError] = self.__dict__.setdefault("known", {})
        way = Way(self.options if options is None else options, accumulate)
        if way not in known:
            try:
                known[way] = super().predict(*way, timeline=timeline)
            except MtaccumError as error:
                known[way] = error
        found = known[way]
        if isinstance(found, MtaccumError):
            raise found
        return found


@cache
def training_of(name: str) -> Remembering:
    return Remembering(build_of(name), batch_of(), build_optimizer=sgd)


@cache
def profile_once(training: FakeTraining) -> Profile:
    return profile_of(training)


@pytest.fixture(autouse=True)
def _profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # copies, since planning leaves out candidates
    monkeypatch.setattr(planner, "profile_of", lambda training: copy.deepcopy(profile_once(training)))


def plans_of(name: str, budget_bytes: int = 2**50) -> PlanReport:
    return plan_training(training_of(name), Budget(budget_bytes, 0, "cpu"))


def way_by(plan: Plan) -> Way:
    """How a plan runs a step."""
    return Way(plan.options, plan.accumulate)


@cache
def measured(name: str, way: Way) -> int:
    """The peak of the second real step, run as a plan says."""
    model = build_of(name)()
    engine = Engine(model, sgd(model), options=way.options)
    engine.step(split_batch(batch_of(), way.accumulate))
    return measure_step(engine, split_batch(batch_of(), way.accumulate))[1].peak_bytes


@cache
def check_gradients(name: str, way: Way) -> None:
    """Those of the joint backward over the whole batch; the random numbers are those of one pass."""
    reference, model = build_of(name)(), build_of(name)()
    seed_everything(5)
    expected = joint_reference(reference, [batch_of()])
    engine = Engine(model, options=way.options)
    seed_everything(5)
    engine.accumulate(split_batch(batch_of(), way.accumulate))
    assert_close_gradients(model, expected, 1e-12)


# --- sweeps of budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_plans_fit_are_exact_if_they_say_so_and_get_no_better_with_less_memory(name: str) -> None:
    whole = plans_of(name)
    top, least = whole.schedules["summed"].peak_bytes, whole.smallest.peak_bytes
    assert whole.recommended is not None
    last: tuple[float, ...] = (0,)
    for part in (1.05, 0.3, 0.0):
        budget = round(least + part * (top - least))
        plan = plans_of(name, budget).recommended
        assert plan is not None
        assert plan.peak_bytes <= budget
        assert measured(name, way_by(plan)) <= 1.01 * budget
        assert measured(name, way_by(plan)) == pytest.approx(plan.peak_bytes, rel=0.01)
        if plan.exactness == 0:
            check_gradients(name, way_by(plan))
        assert plan.rank[:3] >= last
        last = plan.rank[:3]
        # its peak for a budget: the same, or one as good, but that what chunks need is estimated coarsely
        again = plans_of(name, plan.peak_bytes).recommended
        assert again is not None
        assert again.peak_bytes <= plan.peak_bytes
        assert again.exactness == plan.exactness
        assert again.flops_over_summed <= (1.1 if plan.options.chunks else 1.0005) * plan.flops_over_summed
        # a byte less: another one, or none
        below = plans_of(name, plan.peak_bytes - 1)
        assert below.recommended is None or below.recommended.peak_bytes < plan.peak_bytes
    refused = plans_of(name, least - 1)
    assert refused.recommended is None
    assert refused.smallest.peak_bytes == least
    assert f"{least:,} bytes" in refused.reasons()


def test_with_room_for_all_of_it_nothing_is_recomputed_or_split() -> None:
    for name in MODELS:
        plan = plans_of(name).recommended
        assert plan is not None
        assert (plan.accumulate, plan.options.recompute, plan.options.chunks) == (1, (), {}), name
        assert plan.flops_over_summed <= 1.0, name


def test_micro_batches_come_where_nothing_cheaper_does() -> None:
    whole = plans_of("heavy trunk")
    one = [plan for plan in whole.pareto_front if plan.accumulate == 1 and plan.flops_over_summed <= 1.0005]
    fits = plans_of("heavy trunk", min(plan.peak_bytes for plan in one)).recommended
    assert fits is not None
    assert fits.accumulate == 1
    below = plans_of("heavy trunk", fits.peak_bytes // 2).recommended
    assert below is not None
    assert below.accumulate > 1


@pytest.mark.parametrize("name", MODELS)
def test_what_is_less_exact_is_recommended_only_where_nothing_exact_fits(name: str) -> None:
    whole = plans_of(name)
    for kind in (0, 1):
        peaks = [plan.peak_bytes for plan in whole.pareto_front if plan.exactness <= kind]
        plan = plans_of(name, min(peaks)).recommended
        assert plan is not None
        assert plan.exactness <= kind


WHY = {
    "batchnorm everywhere": (2, "BatchNorm normalises by the micro-batch (trunk.0.1"),
    "batchnorm in the trunk": (2, "BatchNorm normalises by the micro-batch (trunk.0.1"),
    "dropout everywhere": (1, "dropout) in trunk, seg"),
    "dropout in heads": (1, "dropout) in seg, depth"),
    "attention with dropout": (1, "dropout) in trunk"),
    "not additive": (2, "the loss of a is no mean over labels"),
    "spectral norm": (2, "changes a state in seg"),
}


@pytest.mark.parametrize("name", MODELS)
def test_several_micro_batches_are_labelled_by_how_exact_they_are(name: str) -> None:
    several = [
        plan for plan in [*plans_of(name).pareto_front, plans_of(name).smallest] if plan.accumulate > 1
    ]
    exactness, why = WHY.get(name, (0, ""))
    for plan in several:
        assert plan.exactness == exactness
        assert why in plan.why
    assert several or name not in WHY


def test_chunks_of_heads_without_random_numbers_are_exact_beside_a_batchnorm() -> None:
    plan = plans_of(
        "batchnorm in the trunk", 3 * plans_of("batchnorm in the trunk").schedules["split"].peak_bytes // 4
    )
    assert plan.recommended is not None
    assert plan.recommended.options.chunks
    assert plan.recommended.exactness == 0


def test_heads_that_draw_are_not_split_into_chunks_while_something_exact_fits() -> None:
    whole = plans_of("dropout in heads")
    exact = min(plan.peak_bytes for plan in whole.pareto_front if plan.exactness == 0)
    assert whole.smallest.peak_bytes < exact
    plan, below = (plans_of("dropout in heads", budget).recommended for budget in (exact, exact - 1))
    assert plan is not None
    assert (plan.exactness, plan.options.chunks) == (0, {})
    assert below is not None
    assert below.exactness == 1


def test_plans_are_as_cheap_as_any_that_is_found_by_trying_them_all() -> None:
    """All K and chunks, with each of the blocks recomputed or not."""
    name = "heavy heads"
    training = training_of(name)
    flops = training.predict(StepOptions("summed")).flops
    segments = [(), ("trunk",), ("seg", "depth"), ("trunk", "seg", "depth")]
    chunks = [{}, *[{"seg": n, "depth": n} for n in (2, 4)]]
    tried = [
        training.predict(*way_of("split", k, recompute=recompute, chunks=numbers))
        for k, recompute, numbers in product((1, 2, 4), segments, chunks)
        if k * numbers.get("seg", 1) <= SAMPLES
    ]
    peaks = sorted(prediction.peak_bytes for prediction in tried)
    for budget in peaks[:: len(peaks) // 4]:
        plan = plans_of(name, budget).recommended
        assert plan is not None
        best = min(prediction.flops for prediction in tried if prediction.peak_bytes <= budget)
        assert plan.flops_over_summed <= best / flops + 1e-3
    assert plans_of(name).smallest.peak_bytes <= 1.01 * peaks[0]


# --- head groups --------------------------------------------------------------------------------------------


def test_small_neighbours_share_a_backward_where_that_fits() -> None:
    plan = plans_of("heavy heads").recommended
    assert plan is not None
    assert plan.options.head_groups == (("cls", "number"),)
    assert plans_of("linear heads").recommended.options.head_groups == (tuple(f"t{i}" for i in range(6)),)  # type: ignore[union-attr]


def test_heads_of_different_modes_share_nothing() -> None:
    plan = plans_of("modes").recommended
    assert plan is not None
    assert plan.options.head_groups == ()


def wide() -> MultiTaskModel:
    """Heads of few operations that keep much."""
    heads = {name: Scored(nn.Sequential(nn.Conv2d(6, 1, 1), nn.Upsample(scale_factor=20))) for name in "ab"}
    return MultiTaskModel(shared(), heads, inputs="image").double()


def test_head_groups_that_do_not_fit_are_not_made() -> None:
    training = FakeTraining(wide, batch_of(), build_optimizer=sgd)
    apart, grouped = (
        training.predict(StepOptions(head_groups=groups)).peak_bytes for groups in ((), (("a", "b"),))
    )
    assert apart < grouped

    def groups(budget_bytes: int) -> tuple[tuple[str, ...], ...]:
        plan = find_plan(wide, batch_of(), budget_bytes=budget_bytes, build_optimizer=sgd).recommended
        assert plan is not None
        return plan.options.head_groups

    assert groups(grouped) == (("a", "b"),)
    assert groups(grouped - 1) == ()


# --- segments that can't be recomputed ----------------------------------------------------------------------


class Forward(nn.Module):
    """A layer that fails in a backward, and so can't be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if running_graph_node() is not None:
            raise RuntimeError("not in a backward")
        return self.conv(x).tanh()


def test_segments_that_fail_when_they_run_again_are_left_out_and_others_recomputed() -> None:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        trunk = nn.Sequential(block(3, 6), Forward(), *(block(6, 6) for _ in range(4)))
        task = Classification(3, head=pooled(), target="cls")
        return MultiTaskModel(trunk, {"cls": task}, inputs="image").double()

    smallest = find_plan(build, batch_of(1), build_optimizer=sgd).smallest
    assert smallest.accumulate == 1
    assert smallest.options.recompute
    assert not {"trunk", "trunk.1"} & set(smallest.options.recompute)


# --- batches and labels -------------------------------------------------------------------------------------


def test_a_batch_of_one_sample_has_one_micro_batch() -> None:
    report = find_plan(build_of("heavy heads"), batch_of(1), build_optimizer=sgd)
    assert report.samples == 1
    assert {plan.accumulate for plan in (*report.pareto_front, report.smallest)} == {1}


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="empty"):
        find_plan(build_of("heavy heads"), batch_of(0), build_optimizer=sgd)


@pytest.mark.parametrize("samples", [3, 5])
def test_a_batch_of_an_odd_number_is_split_into_as_many_at_most(samples: int) -> None:
    training = FakeTraining(build_of("heavy trunk"), batch_of(samples), build_optimizer=sgd)
    smallest = plan_training(training, Budget(2**50, 0, "cpu")).smallest
    assert smallest.accumulate == samples


def test_tasks_without_labels_are_left_out_of_the_plan() -> None:
    batch = batch_of()
    batch["seg"][:] = 255
    batch["depth"] = None
    report = find_plan(build_of("heavy heads"), batch, build_optimizer=sgd)
    names = {segment for plan in report.pareto_front for segment in plan.options.recompute}
    assert not any(name.startswith(("seg", "depth")) for name in names)
    assert report.schedules["summed"].peak_bytes < plans_of("heavy heads").schedules["summed"].peak_bytes


def test_a_plan_is_the_same_each_time() -> None:
    def found() -> list[Way]:
        training = FakeTraining(build_of("dropout in heads"), batch_of(), build_optimizer=sgd)
        report = plan_training(training, Budget(300_000, 0, "cpu"))
        assert report.recommended is not None
        return list(map(way_by, (report.recommended, report.smallest, *report.pareto_front)))

    assert found() == found()


# --- reports ------------------------------------------------------------------------------------------------


def test_a_refusal_says_how_little_can_do_and_what_that_is() -> None:
    with pytest.raises(BudgetError) as refused:
        find_plan(build_of("heavy heads"), batch_of(), budget_bytes=1000, build_optimizer=sgd)
    smallest = plans_of("heavy heads").smallest
    text = str(refused.value)
    assert text.startswith("nothing fits 1000 B (1,000 bytes).")
    assert f"{smallest.peak_bytes:,} bytes; {smallest.describe()}, accumulate={smallest.accumulate}" in text
    assert f"in {smallest.prediction.stage}: " in text
    for kind, nbytes in smallest.prediction.by_kind.items():
        assert (f"{kind} " in text.split(": ", 2)[-1]) == (nbytes > 0), kind
    assert "a smaller batch" in text


@pytest.mark.parametrize("name", ["heavy heads", "batchnorm in the trunk", "dropout everywhere"])
def test_a_front_holds_nothing_that_another_plan_beats(name: str) -> None:
    report = plans_of(name, 250_000)
    peaks = [plan.peak_bytes for plan in report.pareto_front]
    assert peaks == sorted(peaks, reverse=True)
    assert any(way_by(plan) == way_of("summed") for plan in report.pareto_front)
    assert report.recommended in report.pareto_front
    for plan in report.pareto_front:
        better = [
            other
            for other in report.pareto_front
            if other.peak_bytes < plan.peak_bytes
            and other.flops_over_summed <= plan.flops_over_summed
            and other.exactness <= plan.exactness
            and other.accumulate <= plan.accumulate
        ]
        assert not better or way_by(plan) == way_of("summed") or plan == report.recommended


def test_a_report_is_a_table_with_one_arrow_and_the_options() -> None:
    report = plans_of("batchnorm everywhere", 200_000)
    plan = report.recommended
    assert plan is not None
    text = str(report)
    lines = text.splitlines()
    assert lines[0] == "budget 195.3 KiB on cpu"
    rows = [line for line in lines if line.endswith(tuple(p.describe() for p in report.pareto_front))]
    assert len(rows) >= len(report.pareto_front)
    arrows = [line for line in lines if line.startswith("->")]
    assert len(arrows) == 2, "the row, and the reasons"
    assert plan.describe() in arrows[0]
    assert arrows[1] == f"-> {report.reasons()}"
    assert shlex.split(lines[-1]) == plan.overrides()
    assert "BatchNorm normalises by the micro-batch" in text
    exact = plans_of("heavy heads")
    assert exact.reasons().endswith("; the cheapest in FLOPs that fits, with exact gradients")


def test_a_report_without_a_plan_says_why() -> None:
    report = plans_of("heavy heads", 1000)
    assert str(report).splitlines()[-1] == report.reasons()
    assert "->" not in str(report)
    assert report.as_dict()["recommended"] is None


@pytest.mark.parametrize("budget", [1000, 150_000, 2**40])
def test_a_report_is_a_dict_for_json(budget: int) -> None:
    report = plans_of("dropout everywhere", budget)
    values = json.loads(json.dumps(report.as_dict()))
    assert values == report.as_dict() | {
        key: values[key] for key in ("pareto_front", "schedules", "smallest", "recommended")
    }
    assert values["budget"]["tensor_bytes"] == budget
    assert values["batch_size"] == SAMPLES
    assert values["notes"] == list(report.notes)
    assert replace(report, elapsed_s=1.23456).as_dict()["elapsed_s"] == 1.235
    assert set(values["schedules"]) == {"summed", "sequential", "split"}
    for plan in (*values["pareto_front"], values["smallest"]):
        assert sum(plan["peak_by_kind"].values()) == plan["peak_bytes"]
        assert plan["exactness"] in ("exact", "exact in distribution", "not exact")
        assert (plan["why"] == "") == (plan["exactness"] == "exact")


def test_flops_are_told_over_those_of_the_joint_backward() -> None:
    report = plans_of("heavy trunk")
    assert report.schedules["summed"].flops_over_summed == 1.0
    assert report.schedules["split"].flops_over_summed == 1.0
    assert report.schedules["sequential"].flops_over_summed > 1.5


# --- options and overrides ----------------------------------------------------------------------------------


def plan_of(way: Way) -> Plan:
    return Plan(*way, Prediction(0, 0, "", {}, 0), 1.0)


def composed(tmp_path: Path, overrides: list[str], more: list[str]) -> RunConfig:
    """The config that the command makes of a plan's options."""
    configs: list[RunConfig] = []
    arguments = [*more, f"hydra.run.dir={tmp_path}", *overrides]
    assert run_command("train", lambda config: configs.append(config) or 0, arguments) == 0
    return configs[0]


WAYS = [
    way_of("summed"),
    way_of("sequential", 8),
    way_of("split", 4, recompute=("trunk", "seg[0:3]", "depth.0")),
    way_of("split", recompute=("trunk.levels.1[0:2]",), head_groups=(("cls", "number"),)),
    way_of("split", 2, head_groups=(("cls", "number"),), chunks={"seg": 4, "depth": 2}),
    way_of("split", offload=True),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_options_that_are_pasted_give_the_engine_the_same_ones(way: Way, tmp_path: Path) -> None:
    pasted = shlex.split(shlex.join(plan_of(way).overrides()))
    config = composed(tmp_path, pasted, ["+tasks=[seg,cls,number,depth]"])
    assert config.micro_batches == way.accumulate
    assert {name: getattr(config.engine, name) for name in PLANNED} == {
        name: getattr(way.options, name) for name in PLANNED
    }


@pytest.mark.parametrize("name", ["seg-1", "2d", "my task", "null", "on", "a+b", "True"])
def test_names_of_tasks_that_need_quotes_are_pasted_as_they_are(name: str, tmp_path: Path) -> None:
    way = way_of("split", 2, recompute=(f"{name}.0",), head_groups=((name, "other"),))
    config = composed(tmp_path, plan_of(way).overrides(), ["+tasks=[seg]"])
    assert (config.engine.recompute, config.engine.head_groups) == ((f"{name}.0",), ((name, "other"),))
    if name not in ("null", "True"):  # which no key of Hydra's grammar can be
        way = way_of(chunks={name: 4})
        config = composed(tmp_path, plan_of(way).overrides(), ["+tasks=[seg]"])
        assert config.engine.chunks == {name: 4}


def test_overrides_hold_what_is_not_usual_only() -> None:
    assert plan_of(way_of("summed")).overrides() == ["engine=summed", "accumulate=1"]
    assert plan_of(way_of("split", 8, offload=True)).overrides() == [
        *("engine=split", "accumulate=8", "engine.offload=true")
    ]
    assert plan_of(WAYS[4]).overrides() == [
        "engine=split",
        "accumulate=2",
        "engine.head_groups=[[cls,number]]",
        "engine.chunks={seg:4,depth:2}",
    ]


def test_a_plan_is_plain_lists_and_dicts_for_json() -> None:
    values = plan_of(WAYS[4]).as_dict()
    assert {name: values[name] for name in (*PLANNED, "accumulate")} == {
        "schedule": "split",
        "recompute": [],
        "head_groups": [["cls", "number"]],
        "chunks": {"seg": 4, "depth": 2},
        "offload": False,
        "accumulate": 2,
    }
    assert type(values["chunks"]) is dict


def test_plans_rank_by_exactness_then_cost_then_into_how_much_they_are_split_then_memory() -> None:
    def ranked(way: Way, flops: float = 1.0, exactness: int = 0, peak: int = 10) -> tuple[float, ...]:
        return Plan(*way, Prediction(peak, 0, "", {}, 0), flops, exactness).rank

    plain = way_of("split")
    better_first = [
        ranked(way_of("split", head_groups=(("a", "b"),)), peak=30),
        ranked(plain, peak=20),
        ranked(plain, peak=25),
        ranked(way_of("split", recompute=("trunk.3",))),
        ranked(way_of("split", chunks={"a": 2})),
        ranked(way_of("split", 2)),
        ranked(plain, flops=1.002),
        ranked(plain, flops=2.0),
        ranked(way_of("split", offload=True)),
        ranked(plain, exactness=1),
        ranked(plain, exactness=2),
    ]
    assert better_first == sorted(better_first)
    assert len(set(better_first)) == len(better_first)
