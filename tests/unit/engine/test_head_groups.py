"""Head groups: heads on one node that run one after the other and share a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Failing,
    RandomState,
    Squared,
    assert_close_gradients,
    assert_equal_states,
    awkward_batch,
    awkward_model,
    gradients_of,
    joint_reference,
    plain_batch,
    plain_model,
    seed_everything,
)
from torch import Tensor, nn

from mtaccum import (
    ConfigError,
    Engine,
    InplaceError,
    MultiTaskModel,
    Neck,
    NonfiniteError,
    Task,
    TaskError,
    split_batch,
)
from mtaccum.engine import StepOptions, StepResult
from mtaccum.memory import measure_peak

NAN, INF = float("nan"), float("inf")
schedules = pytest.mark.parametrize("schedule", ["split", "sequential"])

PAIRS = [["depth", "cls"], ["left", "right"], ["seg", "bare"]]


def counted() -> tuple[list[float], Callable[[Tensor], None]]:
    """A ``backward=``, and the losses that it got."""
    seen: list[float] = []

    def backward(loss: Tensor) -> None:
        seen.append(loss.item())
        loss.backward()

    return seen, backward


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_same_results(one: StepResult, other: StepResult) -> None:
    """Bit for bit."""
    assert_equal_states(one.losses, other.losses)
    assert_equal_states(one.loss_terms, other.loss_terms)
    assert (one.counts, one.idle, one.micro_batches) == (other.counts, other.idle, other.micro_batches)


# --- exactness --------------------------------------------------------------------------------------------


@schedules
def test_labels_may_be_missing_from_each_task_and_micro_batch(schedule: str) -> None:
    model = plain_model()
    window = split_batch(plain_batch(13, missing=0.5), 3)
    window[0]["value"][:] = NAN  # a head group with an idle member
    window[1]["cls"][:] = -100
    window[1]["value"] = None
    window[1]["other"][:] = NAN  # a micro-batch without any label
    del window[2]["other"]
    seen, backward = counted()

    Engine(model, schedule=schedule, head_groups=[["cls", "value"]], backward=backward).accumulate(window)

    assert_close_gradients(model, joint_reference(model, window), 1e-12)
    assert len(seen) == {"split": 2 + 1, "sequential": 2 + 1}[schedule]


def test_a_head_group_of_which_one_task_has_labels_is_that_task() -> None:
    model, window = plain_model(), [plain_batch(4)]
    window[0]["cls"][:] = -100
    seen, backward = counted()
    result = Engine(model, head_groups=[["cls", "value"]], backward=backward).accumulate(window)
    assert len(seen) == 2
    assert seen[0] == pytest.approx(0.3 * result.losses["value"].item(), rel=1e-12)
    assert all(parameter.grad is None for parameter in model.task("cls").parameters())


@schedules
def test_without_any_label_there_is_no_gradient_and_no_step(schedule: str) -> None:
    model, batch = plain_model(), plain_batch(4)
    batch["cls"][:], batch["value"][:], batch["other"][:] = -100, NAN, NAN
    engine = Engine(model, sgd(model), schedule=schedule, head_groups=[["cls", "value", "other"]])
    assert not engine.step([batch]).stepped
    engine.accumulate([batch, batch])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay")
@pytest.mark.parametrize(
    "modes",
    [
        {"depth": "frozen"},
        {"depth": "frozen", "cls": "detached"},
        {"depth": "detached", "cls": "detached"},
        {"cls": "off"},
        {"left": "frozen", "right": "detached"},
        {"seg": "off", "bare": "detached", "noisy": "off"},
    ],
    ids=str,
)
@schedules
def test_modes_are_each_tasks_own(schedule: str, modes: dict[str, str]) -> None:
    model, window = awkward_model(), split_batch(awkward_batch(6), 2)
    for name, mode in modes.items():
        model.task(name).mode = mode
    seed_everything(2)
    reference = joint_reference(model, window)
    seed_everything(2)
    engine = Engine(model, schedule=schedule, head_groups=PAIRS, recompute=["*"])
    engine.accumulate(window)
    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)


def test_a_head_group_of_detached_tasks_sends_nothing_into_the_trunk() -> None:
    model = plain_model()
    for task in model.tasks_by_name().values():
        task.mode = "detached"
    graphs: list[bool] = []
    model.trunk.register_forward_hook(lambda _m, _i, output: graphs.append(output.requires_grad))
    Engine(model, head_groups=[["cls", "value", "other"]], schedule="sequential").accumulate([plain_batch(4)])
    Engine(model, head_groups=[["cls", "value", "other"]]).accumulate([plain_batch(4)])
    assert graphs == [False, False]
    assert model.trunk[0].weight.grad is None
    assert all(p.grad is not None for p in model.task("cls").parameters())


def test_modes_and_weights_may_change_between_steps() -> None:
    model, window = plain_model(), [plain_batch(6)]
    engine = Engine(model, head_groups=[["cls", "value"]])
    for change in ({"mode": "off"}, {"mode": "frozen"}, {"mode": "train", "weight": 3.0}):
        for name, value in change.items():
            setattr(model.task("cls"), name, value)
        model.zero_grad()
        engine.accumulate(window)
        assert_close_gradients(model, joint_reference(model, window), 1e-12)


class Terms(Task):
    """A loss of two named terms."""

    def loss(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"square": prediction.square().mean(), "mean": prediction.mean()}


@schedules
def test_losses_and_their_terms_are_those_without_head_groups_bit_for_bit(schedule: str) -> None:
    torch.manual_seed(0)
    tasks = {
        "a": Terms(nn.Linear(4, 2), None),
        "b": Squared(nn.Linear(4, 2)),
        "c": Terms(nn.Linear(4, 1), None),
    }
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    window = split_batch({"x": torch.rand(7, 3)}, 3)
    whole = Engine(model, schedule=schedule).accumulate(window)
    model.zero_grad()
    result = Engine(model, schedule=schedule, head_groups=[["a", "b", "c"]]).accumulate(window)
    assert_same_results(result, whole)
    assert set(result.loss_terms) == {"a/square", "a/mean", "c/square", "c/mean"}
    assert_close_gradients(model, joint_reference(model, window), 1e-5)


@schedules
def test_heads_on_different_nodes_of_one_path_may_be_grouped(schedule: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(features[0] + features[1])

    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Linear(3, 4),
        {"both": Squared(Sum(), on=("trunk", "neck")), "one": Squared(nn.Linear(4, 1), on="neck")},
        inputs="x",
        necks={"neck": Neck(nn.Linear(4, 4))},
    ).double()
    window = split_batch({"x": torch.rand(7, 3, dtype=torch.float64)}, 2)
    Engine(model, schedule=schedule, head_groups=[["one", "both"]]).accumulate(window)
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


# --- randomness and buffers -------------------------------------------------------------------------------


def dropout_model(*names: str) -> MultiTaskModel:
    torch.manual_seed(0)
    heads = {
        n: nn.Sequential(nn.Dropout(0.4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.4)) for n in names
    }
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2))
    return MultiTaskModel(trunk, {n: Squared(head) for n, head in heads.items()}, inputs="x").double()


@pytest.mark.parametrize("head_groups", [[["a", "b"]], [["b", "a"], ["d", "c"]], [["b", "c", "d"]]], ids=str)
@schedules
def test_neighbours_draw_the_same_masks_and_move_the_same_statistics_bit_for_bit(
    schedule: str, head_groups: list[list[str]]
) -> None:
    def outcome(
        head_groups: list[list[str]],
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor], RandomState]:
        model, outputs = dropout_model(*"abcd"), {name: [] for name in "abcd"}
        for name in "abcd":
            model.task(name).head.register_forward_hook(
                lambda _m, _i, output, name=name: outputs[name].append(output.detach())
            )
        seed_everything(7)
        Engine(model, schedule=schedule, head_groups=head_groups).accumulate(split_batch({"x": x}, 2))
        return outputs, dict(model.named_buffers()), RandomState()

    x = torch.rand(6, 3, dtype=torch.float64)
    apart, joined = outcome([]), outcome(head_groups)
    for name in "abcd":
        for one, other in zip(apart[0][name], joined[0][name], strict=True):
            assert torch.equal(one, other)
    assert_equal_states(joined[1], apart[1])
    assert joined[2] == apart[2]


def test_the_order_of_a_head_group_is_that_of_the_tasks_where_the_first_one_with_labels_stands() -> None:
    model, order = dropout_model(*"abcd"), []
    for name in "abcd":
        model.task(name).head.register_forward_hook(lambda *_, name=name: order.append(name))
        model.task(name).target = name
    engine = Engine(model, head_groups=[["d", "a"]])
    batch = {"x": torch.rand(3, 3, dtype=torch.float64), **{name: torch.zeros(3) for name in "abcd"}}
    engine.accumulate([batch])
    assert order == ["a", "d", "b", "c"]
    order.clear()
    del batch["a"]
    engine.accumulate([batch])
    assert order == ["b", "c", "d"]


def test_an_order_puts_each_head_group_where_its_first_task_stands() -> None:
    options = StepOptions(head_groups=(("d", "a"), ("e", "c")))
    assert options.in_order("abcde") == ["a", "d", "b", "c", "e"]
    assert options.in_order("bcde") == ["b", "c", "e", "d"]
    assert options.in_order([]) == []
    assert options.head_group_of("b") == ("b",)
    assert options.head_group_of("c") == ("e", "c")


# --- backwards --------------------------------------------------------------------------------------------


@schedules
def test_each_head_group_has_one_backward_of_the_sum_of_its_scaled_losses(schedule: str) -> None:
    model, window = awkward_model(), [awkward_batch(3), awkward_batch(4, seed=2)]
    weights = {name: task.weight for name, task in model.tasks_by_name().items()}
    seen, backward = counted()
    engine = Engine(model, schedule=schedule, head_groups=[["left", "depth", "cls"]], backward=backward)
    labels = engine.count_labels(window)
    seed_everything(1)
    result = engine.accumulate(window)
    assert len(seen) == 2 * (7 - 3 + 1)
    total = sum(weights[name] * loss.item() for name, loss in result.losses.items())
    assert sum(seen) == pytest.approx(total, rel=1e-12)

    model.zero_grad()
    single = engine.accumulate([window[0]])
    grouped = sum(weights[name] * single.losses[name].item() for name in ("left", "depth", "cls"))
    assert any(loss == pytest.approx(grouped, rel=1e-12) for loss in seen[-5:])
    assert labels.micro_batches == 2


def test_sequentially_the_trunk_runs_once_for_a_head_group() -> None:
    model = awkward_model()
    passes: list[None] = []
    model.trunk.register_forward_hook(lambda *_: passes.append(None))
    Engine(model, schedule="sequential", head_groups=[["depth", "cls", "left"]]).accumulate(
        [awkward_batch(2)]
    )
    assert len(passes) == 7 - 3 + 1


def test_training_in_head_groups_is_training_without() -> None:
    models = []
    for head_groups in ([], [["cls", "value"]], [["cls", "value", "other"]]):
        model = plain_model()
        engine = Engine(model, sgd(model), head_groups=head_groups, max_grad_norm=0.5)
        for seed in range(3):
            engine.step(split_batch(plain_batch(9, seed, missing=0.4), 2))
        models.append(model)
    for other in models[1:]:
        for one, two in zip(models[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


def test_losses_of_a_head_group_are_scaled_once() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    gradients = []
    for head_groups in ([], [["cls", "value"]]):
        model = plain_model()
        Engine(model, scaler=scaler, head_groups=head_groups).accumulate([plain_batch(4)])
        gradients.append(gradients_of(model))
    for one, two in zip(gradients[0].values(), gradients[1].values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


# --- memory -----------------------------------------------------------------------------------------------


def peak(model: MultiTaskModel, batch: Any, **settings: Any) -> int:
    """Activation bytes of a window, the gradients being there already."""
    engine = Engine(model, **settings)

    def step() -> None:
        model.zero_grad()
        engine.accumulate([batch])

    measure_peak(step, existing=[model, *batch.values()])
    model.zero_grad()
    return measure_peak(step, existing=[model, *batch.values()]).activation_bytes


def test_a_head_group_takes_what_all_its_heads_take_and_no_more() -> None:
    torch.manual_seed(0)
    trunk = nn.Linear(8, 32)
    heads = {name: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)) for name in "abcd"}
    model = MultiTaskModel(trunk, {name: Squared(head) for name, head in heads.items()}, inputs="x")
    batch = {"x": torch.rand(256, 8)}
    single, summed = peak(model, batch), peak(model, batch, schedule="summed")
    pair = peak(model, batch, head_groups=[["a", "b"], ["c", "d"]])
    all_of_them = peak(model, batch, head_groups=[list("abcd")])
    graph = 256 * 64 * 4  # what a head's tanh keeps
    assert single < pair < all_of_them
    assert pair - single <= 1.1 * graph
    assert all_of_them <= summed + 256 * 32 * 4  # and the gradient at the cut


# --- when something goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [["first", "bad"], ["bad", "last"], ["first", "bad", "last"]], ids=str)
@schedules
def test_a_failing_head_in_a_head_group_leaves_everything_as_it_was_g7(
    schedule: str, group: list[str]
) -> None:
    def build() -> tuple[MultiTaskModel, Failing]:
        torch.manual_seed(0)
        bad = Failing(nn.Linear(4, 2), RuntimeError("broken"))
        heads = {
            "first": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
            "bad": bad,
            "last": nn.Linear(4, 2),
        }
        trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        return MultiTaskModel(trunk, {n: Squared(head) for n, head in heads.items()}, inputs="x"), bad

    window = split_batch({"x": torch.rand(6, 3)}, 2)
    (model, bad), (clean, fine) = build(), build()
    fine.broken = False
    engine = Engine(model, sgd(model), schedule=schedule, head_groups=[group])
    before, random = copy.deepcopy(model.state_dict()), RandomState()

    with pytest.raises(TaskError, match="task 'bad'.*broken"):
        engine.step(window)

    assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal_states(model.state_dict(), before)
    assert RandomState() == random
    bad.broken = False
    seed_everything(1)
    engine.step(window)
    seed_everything(1)
    Engine(clean, sgd(clean), schedule=schedule, head_groups=[group]).step(window)
    assert_equal_states(model.state_dict(), clean.state_dict())


def test_a_failed_head_group_leaves_the_callers_gradients_bitwise_g7() -> None:
    model = plain_model()
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    own = gradients_of(model)
    model.task("value").head = Failing(model.task("value").head, RuntimeError("broken"))
    with pytest.raises(TaskError, match="task 'value'.*broken"):
        Engine(model, head_groups=[["cls", "value"]]).accumulate(
            [plain_batch(4), plain_batch(3)], restore_on_error=True
        )
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, own[name.replace("head.layer", "head")])


@pytest.mark.parametrize("place", [0, 1, 2])
@schedules
def test_a_head_that_writes_into_its_features_is_an_error_that_names_the_head_group(
    schedule: str, place: int
) -> None:
    heads = [nn.Sequential(nn.Linear(4, 2)) for _ in range(3)]
    heads[place] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    tasks = {name: Squared(head) for name, head in zip("abc", heads, strict=True)}
    tasks["other"] = Squared(nn.Linear(4, 2))
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model = MultiTaskModel(trunk, tasks, inputs="x")
    with pytest.raises(InplaceError, match=r"^'a\+b\+c' writes in place into the features"):
        Engine(model, schedule=schedule, head_groups=[["a", "b", "c"]]).accumulate([{"x": torch.rand(3, 3)}])


@pytest.mark.parametrize("bad", ["a", "b", "c"])
@schedules
def test_a_loss_that_is_not_finite_is_named_by_its_task(schedule: str, bad: str) -> None:
    class Ratio(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return (prediction.square().mean(1) / batch[self.target]).mean()

    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 4), {n: Ratio(nn.Linear(4, 2), n) for n in "abc"}, inputs="x")
    window = [{"x": torch.rand(4, 3), **{name: torch.ones(4) for name in "abc"}} for _ in range(2)]
    window[1][bad][2] = 0
    before = copy.deepcopy(model.state_dict())
    engine = Engine(model, sgd(model), schedule=schedule, head_groups=[["a", "b", "c"]])
    with pytest.raises(NonfiniteError, match=rf"the loss of task '{bad}' is inf in micro-batch 1 of 2"):
        engine.step(window)
    assert_equal_states(model.state_dict(), before)


class Rooted(nn.Module):
    """A finite output whose gradient is infinite where the switch is on."""

    def __init__(self, *, bad: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.bad = bad

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y - y.detach()).abs().sqrt() if self.bad else y


@pytest.mark.parametrize("bad", ["a", "b"])
@schedules
def test_a_gradient_that_is_not_finite_is_named_by_its_task(schedule: str, bad: str) -> None:
    torch.manual_seed(0)
    tasks = {name: Squared(Rooted(bad=False)) for name in "abc"}

    class Sum(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return prediction.sum()

    tasks[bad] = Sum(Rooted(bad=True))
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    engine = Engine(model, sgd(model), schedule=schedule, head_groups=[["a", "b"]])
    with pytest.raises(NonfiniteError, match=rf"the gradient of task '{bad}' is not finite in micro-batch 0"):
        engine.step([{"x": torch.rand(4, 3)}])


def test_the_search_draws_the_same_numbers_where_a_head_group_changes_the_order_s3() -> None:
    # the last one of the head group draws before its neighbour, in the step and so in the search
    class Rare(nn.Module):
        """Infinite for one in about a thousand draws."""

        def __init__(self, *, draws: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.draws = draws

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            drawn = torch.rand(())
            return torch.where(drawn < limit, y * INF, y) if self.draws else y

    torch.manual_seed(0)
    tasks = {name: Squared(Rare(draws=name == "c")) for name in "abc"}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    torch.manual_seed(3)
    draws = torch.rand(3)
    # in the order a, c, b the head c gets the second one
    assert draws[1] < draws[2]
    limit = (draws[1] + draws[2]) / 2
    torch.manual_seed(3)
    with pytest.raises(NonfiniteError, match=r"the loss of task 'c' is (inf|nan)"):
        Engine(model, sgd(model), head_groups=[["a", "c"]]).step([X])


X = {"x": torch.linspace(0, 1, 12).reshape(4, 3)}


# --- what is refused --------------------------------------------------------------------------------------


def refuse(head_groups: Any, *words: str, model: MultiTaskModel | None = None, **settings: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(awkward_model() if model is None else model, head_groups=head_groups, **settings)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_task_is_refused_with_the_nearest_and_all_there_are() -> None:
    refuse([["depth", "clss"]], "head_groups", "'clss'", "Did you mean 'cls'?", "Known: bare, cls, depth")
    refuse([["depth", "fpn"]], "head_groups", "'fpn'", "Known: bare, cls, depth")
    refuse([["depth", "trunk"]], "'trunk'")


@pytest.mark.parametrize(
    "head_groups",
    ["cls", "", ["cls", "depth"], [["cls", 3]], [{"cls": "depth"}], {"a": "b"}, None, 3, [[["cls"]]]],
)
def test_head_groups_that_are_no_lists_of_lists_are_refused(head_groups: Any) -> None:
    message = "head_groups must be a list of lists of task names, such as [[cls, number]], got"
    refuse(head_groups, message, repr(head_groups))


def test_lists_and_tuples_will_do() -> None:
    engine = Engine(awkward_model(), head_groups=(("depth", "cls"), ["left", "right"]))
    assert engine.options.head_groups == (("depth", "cls"), ("left", "right"))


@pytest.mark.parametrize("group", [[], ["cls"]])
def test_a_head_group_of_fewer_than_two_tasks_is_refused(group: list[str]) -> None:
    refuse([group], f"head_groups: {group} is no head group; it takes two tasks or more")


@pytest.mark.parametrize("head_groups", [[["cls", "depth"], ["left", "cls"]], [["cls", "cls"]]])
def test_a_task_in_two_head_groups_is_refused(head_groups: list[list[str]]) -> None:
    refuse(head_groups, "head_groups: 'cls' stands in them twice; a task is in one head group")


@pytest.mark.parametrize("group", [["seg", "depth"], ["bare", "noisy"], ["depth", "cls", "noisy"]])
def test_tasks_on_different_nodes_are_refused(group: list[str]) -> None:
    refuse([group], f"head_groups: {', '.join(group)} are on different nodes", "differ in the head only")


def test_head_groups_with_the_schedule_summed_are_refused() -> None:
    refuse([["cls", "depth"]], "head_groups has no effect with schedule='summed'", schedule="summed")
    Engine(awkward_model(), head_groups=[], schedule="summed")


def test_a_task_in_a_head_group_and_in_chunks_is_refused() -> None:
    refuse([["left", "right"]], "'right' can't be in a head group and run in chunks", chunks={"right": 2})
    Engine(awkward_model(), head_groups=[["left", "right"]], chunks={"right": 1, "seg": 2})


def test_without_head_groups_each_head_has_its_own_backward() -> None:
    model, (seen, backward) = plain_model(), counted()
    Engine(model, backward=backward).accumulate([plain_batch(4)])
    assert len(seen) == 3


def test_a_head_group_has_the_gradients_of_the_sum_written_by_hand() -> None:
    model, batch = plain_model(), plain_batch(5)
    Engine(model, head_groups=[["cls", "value", "other"]]).accumulate([batch])
    grouped = gradients_of(model)
    model.zero_grad()
    features = model.trunk(batch["x"])
    weights = torch.tensor([1.0, 2.0, 0.25, 4.0], dtype=torch.float64)
    (
        F.cross_entropy(model.task("cls").head(features), batch["cls"], weights)
        + 0.3 * F.mse_loss(model.task("value").head(features), batch["value"])
        + F.l1_loss(model.task("other").head(features), batch["other"])
    ).backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(grouped[name], gradient, rtol=1e-11, atol=1e-14)
