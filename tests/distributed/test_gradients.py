"""The contract between ranks: a step is that of one process on the micro-batches of all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import SCHEDULE_NAMES, Squared, assert_equal_states, plain_batch, plain_model
from pool import Pool
from ranked import (
    KINDS,
    UNSHARDED,
    Stepped,
    Windows,
    assert_equal_steps,
    batch,
    engine_of,
    expected,
    full_parameters,
    made,
    raised,
    step,
    tree,
)
from torch import Tensor, nn

from mtaccum import Classification, Engine, MultiTaskModel, Regression, Task
from mtaccum.parallel import current_ranks
from mtaccum.structure import map_tensors

kinds = pytest.mark.parametrize("kind", KINDS)

ALL = ("seg", "cls", "five", "pair", "other", "last")


def only(*targets: str) -> list[str]:
    return [target for target in ALL if target not in targets]


def window(rank: int, micro_batches: int, **settings: Any) -> list[Any]:
    return [batch(10 * rank + index, samples=3 - index % 2, **settings) for index in range(micro_batches)]


# for each case the windows of all ranks
CASES: dict[str, Windows] = {
    "one_micro_batch": [window(0, 1), window(1, 1)],
    "three_micro_batches": [window(0, 3), window(1, 3)],
    "ragged": [window(0, 1), window(1, 3), window(2, 2)],
    "no_batch_on_one_rank_d3": [window(0, 2), [], window(2, 1)],
    "no_batch_on_the_first_ranks_d3": [[], [], window(2, 3)],
    "idle_on_one_rank_d7": [window(0, 1), window(1, 1, without=["seg", "other"]), window(2, 1)],
    "idle_everywhere_d7_i1": [window(rank, 2, without=["seg", "pair"]) for rank in range(3)],
    "each_rank_another_task_d3": [
        window(0, 2, without=only("seg")),
        window(1, 1, without=only("cls", "pair")),
        window(2, 3, without=only("other", "last")),
    ],
    "in_the_last_micro_batch_only": [
        window(0, 3, without=only("seg", "last")),
        [*window(1, 2, without=["cls", "pair"]), batch(99)],
        window(2, 2, without=["cls", "pair"]),
    ],
    "in_the_first_micro_batch_only": [
        [batch(98), *window(0, 2, without=only("seg", "last"))],
        window(1, 2, without=only("last")),
        [],
    ],
    "a_micro_batch_without_labels_l1": [
        [batch(97, without=ALL), batch(96)],
        [batch(95, without=ALL)],
        [batch(94, without=ALL), batch(93, without=ALL), batch(92)],
    ],
    "one_sample_without_labels": [window(0, 2), [batch(91), batch(90, samples=1, without=ALL)]],
    "one_sample_without_labels_and_nothing_else": [window(0, 2), [batch(89, samples=1, without=ALL)]],
    "an_empty_batch_first": [[map_tensors(batch(88), lambda t: t[:0]), batch(87)], []],
    "a_batch_that_can_not_be_split": [[batch(86, edges=torch.zeros(2, 7))], []],
    "terms_on_one_rank": [window(0, 2), window(1, 2, rough=True)],
}


def each_schedule(kind: str, windows: Windows) -> list[Stepped]:
    return [step(tree, kind, windows, {"schedule": schedule}) for schedule in SCHEDULE_NAMES]


@pytest.mark.parametrize("case", CASES)
@kinds
def test_a_step_is_that_of_one_process_d1(pool: Pool, kind: str, case: str) -> None:
    windows = CASES[case]

    found = pool.run(each_schedule, kind, windows, ranks=len(windows))

    one = expected(tree, windows, {})
    for schedule, stepped in zip(SCHEDULE_NAMES, zip(*found, strict=True), strict=True):
        print(schedule)
        assert_equal_steps(stepped, one)


# --- what else a model and an engine may be --------------------------------------------------------------


def small(**weights: float) -> MultiTaskModel:
    return plain_model(**weights)


def frozen_trunk() -> MultiTaskModel:
    model = tree()
    model.trunk.requires_grad_(False)
    return model


def normalising_by_statistics() -> MultiTaskModel:
    model = tree()
    for layer in model.modules():
        layer.train(not isinstance(layer, nn.BatchNorm2d))
    return model


def independent() -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {
        "cls": Classification(4, head=nn.Linear(3, 4), target="cls"),
        "value": Regression(2, head=nn.Linear(3, 2), target="value"),
    }
    return MultiTaskModel(None, tasks, inputs="x").double()


def normalising() -> MultiTaskModel:
    """Its BatchNorm refuses a single sample."""
    model = independent()
    return MultiTaskModel(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), model.tasks_by_name(), inputs="x"
    ).double()


class Halves(nn.Module):
    """A head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"first": self.first(features), "second": self.second(features)}


class AsAsked(Task):
    """A loss on those entries of the prediction that the batch names; 0 if none."""

    def loss(self, prediction: dict[str, Tensor], batch: Any) -> Any:
        return sum((prediction[name].square().mean() for name in batch["asked"]), torch.zeros(()))


def halves() -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {"halves": AsAsked(Halves(), "y"), "other": Squared(nn.Linear(8, 1))}
    return MultiTaskModel(nn.Linear(3, 8), tasks, inputs="x").double()


def heads_apart() -> MultiTaskModel:
    """Beside a head that learns one with statistics, and one from whose pass nothing could learn."""
    torch.manual_seed(0)
    tasks = {
        "normed": Squared(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1)), "cls"),
        "fixed": Squared(nn.Identity(), "value"),
        "other": Squared(nn.Linear(8, 1)),
    }
    model = MultiTaskModel(nn.Linear(3, 8), tasks, inputs="x").double()
    model.trunk.requires_grad_(False)
    return model


def asking(*asked: str, labelled: bool = True) -> list[Any]:
    made = plain_batch(3, seed=len(asked))
    return [{"x": made["x"], "asked": asked, "y": made["x"] if labelled else None}]


def plain(*samples: int, missing: float = 0.5) -> list[Any]:
    return [plain_batch(number, seed=7 * number + i, missing=missing) for i, number in enumerate(samples)]


RAGGED = [window(0, 2), window(1, 1, without=["seg"]), []]
PLAIN = [plain(3, 2), plain(5), plain(1, 4, 2)]

OPTIONS: dict[str, tuple[Any, Windows, dict[str, Any]]] = {
    "head_groups": (tree, RAGGED, {"head_groups": [["cls", "side", "terms"]]}),
    "head_groups_sequential": (
        tree, RAGGED, {"head_groups": [["side", "again"]], "schedule": "sequential"}
    ),
    "recompute_a_node": (tree, RAGGED, {"recompute": ["trunk", "fpn"]}),
    "recompute_segments": (tree, RAGGED, {"recompute": ["trunk.conv", "seg.conv"], "schedule": "sequential"}),
    "clipped_n9": (tree, RAGGED, {"max_grad_norm": 0.1}),
    "normalised_by_running_statistics": (normalising_by_statistics, RAGGED, {"batchnorm": "freeze"}),
    "frozen_trunk": (frozen_trunk, RAGGED, {}),
    "frozen_trunk_summed": (frozen_trunk, RAGGED, {"schedule": "summed"}),
    "no_trunk": (independent, PLAIN, {}),
    "no_trunk_sequential": (independent, [plain(2), [], []], {"schedule": "sequential"}),
    "batchnorm_and_no_batch_on_one_rank": (normalising, [plain(3), [], plain(2, 4)], {}),
    "class_weights_l6": (small, PLAIN, {}),
    "labels_in_a_batch_of_one_rank_only_l1": (
        small, [plain(2, missing=9), plain(3, missing=9), plain(4, 1, missing=0)], {}
    ),
    "weights": (partial(small, cls=0.3, value=0.0, other=7.0), PLAIN, {}),
    "another_entry_of_the_prediction": (halves, [asking("first"), asking("second")], {}),
    "one_entry_of_the_prediction_on_an_idle_rank": (
        halves, [asking("first"), asking("first", labelled=False), asking(labelled=False)], {}
    ),
    "a_loss_that_is_constant_on_one_rank": (halves, [asking(), asking("second")], {}),
    "a_loss_that_is_constant_summed": (halves, [asking(), asking("first")], {"schedule": "summed"}),
    "heads_apart_that_are_idle_on_one_rank": (
        heads_apart, [[plain_batch(3)], [plain_batch(4) | {"cls": None, "value": None}]], {}
    ),
    "only_a_detached_task_at_last": (
        tree, [[batch(1), batch(2, without=only("last"))], [batch(3), batch(4, without=only("last"))]], {}
    ),
    "only_a_detached_task_at_last_sequential": (
        tree, [[batch(1), batch(2, without=only("last"))], [batch(3)]], {"schedule": "sequential"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@kinds
def test_whatever_the_model_and_the_options(pool: Pool, kind: str, name: str) -> None:
    build, windows, options = OPTIONS[name]

    found = pool.run(step, build, kind, windows, options, ranks=len(windows))

    assert_equal_steps(found, expected(build, windows, options))


def frozen_head() -> MultiTaskModel:
    model = tree()
    model.task("cls").mode = "frozen"
    return model


ONLY_UNSHARDED: dict[str, tuple[Any, Windows, dict[str, Any]]] = {
    "chunks": (small, PLAIN, {"chunks": {"cls": 2, "other": 3}}),
    "tied": (partial(tree, tied=True), RAGGED, {}),
    "tied_sequential": (partial(tree, tied=True), RAGGED, {"schedule": "sequential"}),
    "tied_and_one_idle_everywhere": (
        partial(tree, tied=True), [window(0, 1, without=["pair"]), window(1, 2, without=["pair"])], {}
    ),
    "frozen_head": (frozen_head, RAGGED, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY_UNSHARDED)
@pytest.mark.parametrize("kind", UNSHARDED)
def test_what_fsdp_does_not_take(pool: Pool, kind: str, name: str) -> None:
    build, windows, options = ONLY_UNSHARDED[name]

    found = pool.run(step, build, kind, windows, options, ranks=len(windows))

    assert_equal_steps(found, expected(build, windows, options))


class Deaf(nn.Module):
    """A head that takes no gradient to its features, without its task's mode saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.linear(features.detach())
        return out


def deaf(mode: str, last: bool) -> MultiTaskModel:
    torch.manual_seed(0)
    tasks: dict[str, Task] = {"cls": Classification(4, head=nn.Linear(8, 4), target="cls")}
    value = Regression(1, head=Deaf(), target="deaf", mode=mode)
    tasks = {**tasks, "value": value} if last else {"value": value, **tasks}
    return MultiTaskModel(nn.Linear(3, 8), tasks, inputs="x").double()


def listening(*labels: str) -> list[Any]:
    batches = []
    for index, names in enumerate(labels):
        made = plain_batch(3, seed=index, missing=0)
        batches.append({"x": made["x"], "cls": made["cls"], "deaf": made["x"][:, :1]})
        batches[-1] |= {name: None for name in ("cls", "deaf") if name not in names}
    return batches


def stepping(mode: str, last: bool, schedule: str, labels: list[str]) -> str:
    model = made(partial(deaf, mode, last), "fsdp")
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    return raised(engine.step, listening(*labels))


@pytest.mark.parametrize(
    ("schedule", "labels"),
    [("sequential", ["cls deaf"]), ("sequential", ["cls", "deaf"]), ("split", ["cls deaf", "deaf"])],
)
def test_a_head_that_sends_nothing_back_must_say_so_under_fsdp(
    pool: Pool, schedule: str, labels: list[str]
) -> None:
    for error in pool.run(stepping, "train", True, schedule, labels):
        assert error.startswith("TaskError: under parallel=fsdp 'trunk' can't learn here: the last task")
        assert "'value', and sends it no gradient" in error
        assert "mode='detached'" in error
    windows = [listening(*labels), listening(*labels)]
    found = pool.run(step, partial(deaf, "detached", True), "fsdp", windows, {"schedule": schedule})
    assert_equal_steps(found, expected(partial(deaf, "detached", True), windows, {}))
    if labels == ["cls deaf"]:  # another task comes last
        found = pool.run(step, partial(deaf, "train", False), "fsdp", windows, {"schedule": schedule})
        assert_equal_steps(found, expected(partial(deaf, "train", False), windows, {}))


# --- closed forms ----------------------------------------------------------------------------------------


class Weight(nn.Module):
    """One number, times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def one_number() -> MultiTaskModel:
    return MultiTaskModel(None, {"y": Regression(1, head=Weight(), target="y", criterion="l1")}, inputs="x")


@kinds
def test_each_label_weighs_the_same_n2(pool: Pool, kind: str) -> None:
    def labelled(values: list[float], labels: int) -> list[Any]:
        x = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        y = torch.full_like(x, -100.0)  # far below, so that the gradient is the mean of x
        y[labels:] = float("nan")
        return [{"x": x, "y": y}]

    windows = [labelled([8.0, 100.0, 100.0], 1), labelled([1.0, 2.0, 5.0], 3)]

    for stepped in pool.run(step, one_number, kind, windows, {}):
        assert stepped.gradients["tasks.y.head.weight"].item() == (8 + 1 + 2 + 5) / 4
        assert stepped.result.counts == {"y": 4}
        assert stepped.result.losses["y"].item() == 100 + (8 + 1 + 2 + 5) / 4


def steps(
    build: Any, kind: str, windows: Windows, number: int, settings: dict[str, Any]
) -> dict[str, Tensor]:
    model = made(build, kind)
    before = full_parameters(model)
    engine = engine_of(kind, model, torch.optim.AdamW(model.parameters(), lr=0.01, **settings))
    own = windows[current_ranks().rank]
    for index in range(number):
        engine.step(own[index % len(own) :] if own else [])
    after = full_parameters(model)
    return {**after, **{f"before.{name}": value for name, value in before.items()}}


@pytest.mark.parametrize("number", [1, 20])
@kinds
def test_parameters_stay_equal_to_the_bit_d1_d6(pool: Pool, kind: str, number: int) -> None:
    windows = [window(0, 2), window(1, 1, without=["seg", "pair"]), window(2, 3)]

    first, *others = pool.run(steps, tree, kind, windows, number, {}, ranks=3)

    for other in others:
        assert_equal_states(first, other)
    assert not torch.equal(first["trunk.conv.weight"], first["before.trunk.conv.weight"])


@kinds
def test_adamw_leaves_what_is_idle_everywhere_as_it_is_i1_d7(pool: Pool, kind: str) -> None:
    windows = [window(0, 1, without=["pair", "seg"]), window(1, 1, without=["pair"])]

    for after in pool.run(steps, tree, kind, windows, 3, {"weight_decay": 0.5}):
        names = [name for name in after if f"before.{name}" in after]
        moved = {name for name in names if not torch.equal(after[name], after[f"before.{name}"])}
        assert {"tasks.seg.head.conv.weight", "trunk.conv.weight"} <= moved
        still = ("tasks.side", "tasks.again", "trunk.side", "trunk.unused")
        assert not {name for name in moved if name.startswith(still)}


@kinds
def test_adamw_leaves_what_is_idle_as_it_is_after_it_has_learned_i1(pool: Pool, kind: str) -> None:
    windows = [[batch(rank), batch(rank + 2, without=["pair"])] for rank in range(2)]

    first, then = (pool.run(steps, tree, kind, windows, number, {"weight_decay": 0.5}) for number in (1, 2))

    for before, after in zip(first, then, strict=True):
        assert not torch.equal(before["trunk.side.weight"], before["before.trunk.side.weight"])
        same = {name for name, value in before.items() if torch.equal(value, after[name])}
        assert {"trunk.side.weight", "tasks.side.head.layer.weight"} <= same
        assert "trunk.conv.weight" not in same
