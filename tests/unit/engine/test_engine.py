"""Engine: one window in, one optimizer step out."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SCHEDULE_NAMES,
    Failing,
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
    BatchError,
    Classification,
    ConfigError,
    Engine,
    FeatureError,
    InexactWarning,
    LabelError,
    MtaccumError,
    MultiTaskModel,
    OptimizerError,
    Regression,
    Task,
    TaskError,
    reduce_gradients,
    split_batch,
    windows,
)
from mtaccum.engine import label_counts

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
NAN = float("nan")


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def no_gradients(model: nn.Module) -> bool:
    return all(parameter.grad is None for parameter in model.parameters())


class Constant(Task):
    """The same loss whatever comes; with a gradient of 0."""

    def __init__(self, head: nn.Module, value: float) -> None:
        super().__init__(head, None, weight=0.3)
        self.value = value

    def loss(self, prediction: Tensor, batch: Any) -> Any:
        return self.value + 0 * prediction.sum()


# --- the same training for every number of micro-batches --------------------------------------------------


def train(batches: list[Any], micro_batches: int, schedule: str = "split") -> tuple[nn.Module, int, int, int]:
    """Runs each batch as one window; returns the model, the updates, the micro-batches and the ticks."""
    model = plain_model()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    engine = Engine(model, optimizer, schedule=schedule, lr_scheduler=scheduler)
    results = [engine.step(split_batch(batch, micro_batches)) for batch in batches]
    updates = sum(result.stepped for result in results)
    return model, updates, sum(result.micro_batches for result in results), scheduler.last_epoch


@schedules
def test_accumulate_changes_neither_updates_nor_ticks_nor_weights_n3_n7(schedule: str) -> None:
    batches = list(_batches_of(plain_batch(24), 6))
    models = []
    for micro_batches in (1, 2, 3):
        model, updates, passes, ticks = train(batches, micro_batches, schedule)
        assert (updates, passes, ticks) == (4, 4 * micro_batches, 4)
        models.append(model)
    for other in models[1:]:
        for one, two in zip(models[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


def test_updates_and_micro_batches_of_an_epoch() -> None:
    _, updates, passes, ticks = train(list(_batches_of(plain_batch(1000), 10)), 2)
    assert (updates, passes, ticks) == (100, 200, 100)


def _batches_of(data: dict[str, Tensor], size: int) -> Any:
    for start in range(0, len(data["x"]), size):
        yield {key: value[start : start + size] for key, value in data.items()}


def test_7_batches_in_windows_of_4_are_2_updates_n5() -> None:
    model = plain_model()
    engine = Engine(model, sgd(model))
    results = [engine.step(window) for window in windows(_batches_of(plain_batch(70), 10), micro_batches=4)]
    assert [(result.stepped, result.micro_batches) for result in results] == [(True, 4), (True, 3)]


def test_no_gradient_leaks_into_the_next_epoch_n5() -> None:
    model = plain_model()
    engine = Engine(model, sgd(model))
    for _ in range(2):
        assert no_gradients(model)
        for window in windows(_batches_of(plain_batch(30), 2), micro_batches=8):
            engine.step(window)
            assert no_gradients(model)


@pytest.mark.parametrize("missing", [0.0, 0.5])
@pytest.mark.parametrize("micro_batches", [1, 4, 5])
@schedules
def test_a_batch_of_64_has_one_gradient_whatever_k_n3_l6(
    schedule: str, micro_batches: int, missing: float
) -> None:
    # with `missing`, labels lack the more the later the sample, so each micro-batch has other counts;
    # one task has class weights
    model, batch = plain_model(), plain_batch(64, missing=missing)
    whole = joint_reference(model, [batch])

    result = Engine(model, schedule=schedule).accumulate(split_batch(batch, micro_batches))

    assert_close_gradients(model, whole, 1e-12)
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(whole.losses[name].item(), rel=1e-13)


def test_the_short_window_at_the_end_is_normalised_by_itself_n4() -> None:
    model = plain_model()
    for window in windows(_batches_of(plain_batch(23), 5), micro_batches=2):
        model.zero_grad()
        Engine(model).accumulate(window)
        whole = {key: torch.cat([batch[key] for batch in window]) for key in window[0]}
        assert_close_gradients(model, joint_reference(model, [whole]), 1e-12)
    assert len(window) == 1, "the last window was to be the short one"


@schedules
def test_each_of_110_tokens_weighs_the_same_n1(schedule: str) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Embedding(7, 4),
        {"lm": Classification(num_classes=5, head=nn.Linear(4, 5), target="y")},
        inputs="x",
    ).double()
    # the target is flattened, as language models do it
    tokens = [{"x": torch.randint(0, 7, (n,)), "y": torch.randint(0, 5, (n,))} for n in (10, 100)]

    Engine(model, schedule=schedule).accumulate(tokens)

    x, y = (torch.cat([batch[key] for batch in tokens]) for key in "xy")
    by_hand = copy.deepcopy(model)
    by_hand.zero_grad()
    losses = F.cross_entropy(by_hand.task("lm").head(by_hand.trunk(x)), y, reduction="none")
    (losses / 110).sum().backward()
    for one, two in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("value", [4.0, 0.1, 1 / 3])  # sums of the others round
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
@schedules
def test_a_constant_loss_of_4_is_reported_as_4_n6(schedule: str, micro_batches: int, value: float) -> None:
    model = MultiTaskModel(nn.Linear(3, 2), {"t": Constant(nn.Linear(2, 1), value)}, inputs="x")
    batch = {"x": torch.rand(7, 3)}
    result = Engine(model, sgd(model), schedule=schedule).step(split_batch(batch, micro_batches))
    assert result.losses["t"].item() == torch.tensor(value).item()
    assert result.losses["t"].dtype == torch.float32
    assert result.micro_batches == micro_batches


# --- step and accumulate ----------------------------------------------------------------------------------


@schedules
def test_after_a_step_every_gradient_is_none(schedule: str) -> None:
    model = awkward_model()
    result = Engine(model, sgd(model), schedule=schedule).step([awkward_batch(3), awkward_batch(2)])
    assert result.stepped
    assert no_gradients(model)


@schedules
def test_accumulate_adds_two_means_to_what_is_there(schedule: str) -> None:
    model = plain_model()
    windows_ = [[plain_batch(5, seed=1)], split_batch(plain_batch(9, seed=2), 2)]
    own = {name: torch.rand_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = own[name].clone()
    one, two = (joint_reference(model, window).gradients for window in windows_)

    engine = Engine(model, schedule=schedule)
    for window in windows_:
        result = engine.accumulate(window)
        assert not result.stepped
        assert result.grad_norm is None

    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, own[name] + one[name] + two[name], rtol=1e-12, atol=1e-14)


def test_accumulate_leaves_the_weights_and_idle_gradients_alone() -> None:
    model = plain_model()
    mine = torch.rand(4, 8, dtype=torch.float64)
    model.task("cls").head.weight.grad = mine
    batch = plain_batch(5)
    del batch["cls"]
    before = weights_of(model)
    Engine(model).accumulate([batch])
    assert_equal_states(weights_of(model), before)
    assert model.task("cls").head.weight.grad is mine
    assert model.task("cls").head.bias.grad is None


def test_a_step_drops_gradients_that_were_there_and_says_so() -> None:
    model, other = plain_model(), plain_model()
    model.trunk[0].weight.grad = torch.full_like(model.trunk[0].weight, 1e6)
    engine = Engine(model, sgd(model))
    with pytest.warns(UserWarning, match=r"dropped gradients.*accumulate\(\)"):
        engine.step([plain_batch(5)])
    Engine(other, sgd(other)).step([plain_batch(5)])
    assert_equal_states(weights_of(model), weights_of(other))


def test_on_gradients_comes_once_after_all_tasks_and_before_clipping_n8() -> None:
    model, seen = plain_model(), []
    window = split_batch(plain_batch(9), 3)
    reference = joint_reference(model, window)

    def look(given: MultiTaskModel) -> None:
        assert given is model
        assert_close_gradients(given, reference, 1e-12)
        seen.append(weights_of(given))

    before = weights_of(model)
    engine = Engine(model, sgd(model), max_grad_norm=1e-3, on_gradients=look)
    engine.step(window)
    engine.step([{"x": torch.rand(3, 3, dtype=torch.float64)}])  # no labels: no step
    engine.accumulate(window)
    assert len(seen) == 1
    assert_equal_states(seen[0], before)


def test_what_on_gradients_does_to_the_gradients_is_what_steps_n8() -> None:
    model = plain_model()
    before = weights_of(model)

    def zero(given: nn.Module) -> None:
        for parameter in given.parameters():
            parameter.grad.zero_()

    result = Engine(model, sgd(model), on_gradients=zero).step([plain_batch(5)])
    assert_equal_states(weights_of(model), before)
    assert result.grad_norm.item() == 0


def test_hooks_of_the_optimizer_run_once_per_step_n8() -> None:
    model, calls = plain_model(), []
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: calls.append("ema"))
    engine = Engine(model, optimizer)
    for _ in range(3):
        engine.step(split_batch(plain_batch(8), 4))
    engine.step([{"x": torch.rand(3, 3, dtype=torch.float64)}])
    assert calls == ["ema"] * 3


def test_the_scheduler_does_not_tick_without_a_step_n7() -> None:
    model = plain_model()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = Engine(model, optimizer, lr_scheduler=scheduler)
    engine.step(split_batch(plain_batch(8), 4))
    assert scheduler.get_last_lr() == [0.05]
    engine.step([{"x": torch.rand(3, 3, dtype=torch.float64)}])
    engine.accumulate([plain_batch(3)])  # the loop is somebody else's
    assert scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize("micro_batches", [1, 3])
@schedules
def test_clipping_is_once_on_the_sum_of_all_tasks_n9(schedule: str, micro_batches: int) -> None:
    model = plain_model()
    window = split_batch(plain_batch(9), micro_batches)
    reference = joint_reference(model, window).gradients
    norm = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    limit = norm.item() / 3
    before = weights_of(model)

    result = Engine(model, sgd(model, lr=1.0), schedule=schedule, max_grad_norm=limit).step(window)

    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    for name, weight in weights_of(model).items():
        # torch divides by norm + 1e-6
        torch.testing.assert_close(before[name] - weight, reference[name] / 3, rtol=1e-5, atol=1e-12)


def test_a_norm_below_the_limit_clips_nothing_n9() -> None:
    one, other = plain_model(), plain_model()
    Engine(one, sgd(one), max_grad_norm=1e6).step([plain_batch(5)])
    Engine(other, sgd(other)).step([plain_batch(5)])
    assert_equal_states(weights_of(one), weights_of(other))


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_backward_gets_each_scaled_loss_once(schedule: str) -> None:
    model, given = plain_model(value=0.25), []

    def backward(loss: Tensor) -> None:
        given.append(loss.item())
        loss.backward()

    window = split_batch(plain_batch(10), 2)
    reference = joint_reference(model, window)
    Engine(model, schedule=schedule, backward=backward).accumulate(window)

    assert len(given) == 6
    sums = {name: given[i] + given[i + 3] for i, name in enumerate(("cls", "value", "other"))}
    for name, total in sums.items():
        expected = model.task(name).weight * reference.losses[name].item()
        assert total == pytest.approx(expected, rel=1e-12)


def test_backward_of_summed_gets_the_sum_once() -> None:
    model, given = plain_model(), []

    def backward(loss: Tensor) -> None:
        given.append(loss.item())
        loss.backward()

    batch = plain_batch(10)
    reference = joint_reference(model, [batch])
    Engine(model, schedule="summed", backward=backward).accumulate([batch])
    assert given == [
        pytest.approx(
            sum(model.task(n).weight * loss.item() for n, loss in reference.losses.items()), rel=1e-12
        )
    ]


@schedules
def test_a_backward_that_scales_scales_the_gradient_once(schedule: str) -> None:
    # as a gradient scaler does; gradients at a cut are scaled already when they go back
    model = plain_model()
    reference = joint_reference(model, [plain_batch(6)])
    Engine(model, schedule=schedule, backward=lambda loss: (loss * 1024).backward()).accumulate(
        [plain_batch(6)]
    )
    for parameter in model.parameters():
        parameter.grad /= 1024
    assert_close_gradients(model, reference, 1e-12)


def test_weights_may_change_between_steps() -> None:
    model = plain_model()
    engine = Engine(model)
    model.task("value").weight = 7.0
    engine.accumulate([plain_batch(5)])
    assert_close_gradients(model, joint_reference(model, [plain_batch(5)]), 1e-12)


# --- idle tasks and missing labels ------------------------------------------------------------------------


@schedules
def test_an_idle_head_stays_bitwise_as_it_was_i1(schedule: str) -> None:
    model = plain_model()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), schedule=schedule)
    engine.step([plain_batch(6)])  # from here on there is momentum
    idle = weights_of(model.task("value"))
    others = weights_of(model.task("cls"))
    batch = plain_batch(6, seed=2)
    batch["value"].fill_(NAN)

    result = engine.step(split_batch(batch, 2))

    assert_equal_states(weights_of(model.task("value")), idle)
    assert not torch.equal(model.task("cls").head.weight, others["head.weight"])
    assert result.idle == {"value": "no labels"}
    assert result.counts["value"] == 0
    assert "value" not in result.losses


@schedules
def test_all_labels_ignored_leaves_the_other_tasks_bitwise_unchanged_l1(schedule: str) -> None:
    batch = plain_batch(6)
    batch["cls"].fill_(-100)
    with_idle, without = plain_model(), plain_model(cls=0.0)

    result = Engine(with_idle, schedule=schedule).accumulate([batch])
    Engine(without, schedule=schedule).accumulate([batch])

    assert result.idle == {"cls": "no labels"}
    for one, two in zip(with_idle.parameters(), without.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad)
    assert no_gradients(with_idle.task("cls"))


@schedules
def test_an_idle_task_runs_neither_its_head_nor_its_neck_l1(schedule: str) -> None:
    model = awkward_model()
    passes: list[str] = []
    for name in ("noisy", "deep"):
        model.node(name).register_forward_hook(lambda *_, name=name: passes.append(name))
    whole, without = awkward_batch(3), awkward_batch(3, seed=2)
    without["pair"].fill_(NAN)
    Engine(model, schedule=schedule).accumulate([without])
    assert passes == []
    result = Engine(model, schedule=schedule).accumulate([without, whole])
    assert passes == ["deep", "noisy"]
    assert result.idle == {}


@schedules
def test_samples_labelled_for_some_tasks_equal_training_on_the_subsets_l3(schedule: str) -> None:
    batch = plain_batch(12)
    subsets = {"cls": slice(0, 5), "value": slice(4, 11), "other": slice(9, 12)}
    for key, label in (("cls", -100), ("value", NAN), ("other", NAN)):
        keep = torch.zeros(12, dtype=torch.bool)
        keep[subsets[key]] = True
        batch[key][~keep] = label
    model = plain_model()

    Engine(model, schedule=schedule).accumulate(split_batch(batch, 5))

    by_hand = plain_model()
    head = {name: task.head for name, task in by_hand.tasks_by_name().items()}

    def on_subset(name: str) -> tuple[Tensor, Tensor]:
        rows = subsets[name]
        return head[name](by_hand.trunk(batch["x"][rows])), batch[name][rows]

    prediction, target = on_subset("cls")
    F.cross_entropy(prediction, target, weight=by_hand.task("cls").class_weights).backward()
    (0.3 * F.mse_loss(*on_subset("value"))).backward()
    F.l1_loss(*on_subset("other")).backward()
    for one, two in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("empty", ["absent", "None", "no samples"])
def test_what_is_not_in_the_batch_is_skipped_and_counted_l4(empty: str) -> None:
    model, other = plain_model(), plain_model()
    whole, gone = plain_batch(5), plain_batch(4, seed=3)
    if empty == "absent":
        for key in ("cls", "value", "other"):
            del gone[key]
    elif empty == "None":
        gone = {"x": gone["x"], "cls": None, "value": None, "other": None}
    else:
        gone = {key: value[:0] for key, value in gone.items()}

    result = Engine(model).accumulate([gone, whole, gone])
    Engine(other).accumulate([whole])

    assert result.micro_batches == 3
    assert result.idle == {}
    assert result.counts["other"] == 5
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize(
    "window", [[], [{"x": torch.rand(3, 3, dtype=torch.float64)}]], ids=["empty", "no label"]
)
def test_a_window_without_any_label_is_no_step_l4(window: list[Any]) -> None:
    model = plain_model()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    engine.step([plain_batch(4)])
    before = weights_of(model)
    result = engine.step(window)
    assert not result.stepped
    assert result.idle == dict.fromkeys(("cls", "value", "other"), "no labels")
    assert result.losses == {}
    assert_equal_states(weights_of(model), before)


def test_one_optimizer_state_per_parameter_g8() -> None:
    model = awkward_model()
    optimizer = torch.optim.Adam(model.parameters())
    Engine(model, optimizer).step([awkward_batch(3), awkward_batch(2)])
    assert len(optimizer.state) == len(list(model.parameters()))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_a_loss_that_goes_negative_is_fine_i4() -> None:
    class Uncertain(Regression):
        """Weighs its loss by a learned log variance."""

        def __init__(self) -> None:
            super().__init__(1, head=nn.Linear(8, 1), target="other", criterion="mse")
            self.log_variance = nn.Parameter(torch.tensor(-3.0))

        def loss(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
            error = super().loss(prediction, batch)
            return {"error": error * torch.exp(-self.log_variance), "log": 0.5 * self.log_variance}

    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 8), {"t": Uncertain()}, inputs="x").double()
    nn.init.zeros_(model.task("t").head.weight)
    batch = plain_batch(8)
    batch["other"] = torch.zeros(8, 1, dtype=torch.float64)
    nn.init.zeros_(model.task("t").head.bias)
    result = Engine(model, sgd(model, lr=0.1)).step(split_batch(batch, 2))
    assert result.losses["t"].item() == pytest.approx(-1.5)
    assert result.stepped
    assert model.task("t").log_variance.item() == pytest.approx(-3.05)


# --- results ----------------------------------------------------------------------------------------------


class InTerms(Squared):
    def loss(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"first": prediction.mean(), "second": prediction.pow(2).mean()}


@schedules
def test_named_terms_are_reported_and_their_sum_is_the_loss(schedule: str) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 4), {"t": InTerms(nn.Linear(4, 2), weight=5.0)}, inputs="x").double()
    batch = {"x": torch.rand(7, 3, dtype=torch.float64)}
    prediction = model(batch)["t"].detach()

    result = Engine(model, schedule=schedule).accumulate(split_batch(batch, 3))

    first, second = prediction.mean().item(), prediction.pow(2).mean().item()
    assert set(result.losses) == {"t"}
    assert result.losses["t"].item() == pytest.approx(first + second, rel=1e-12)
    assert {name: term.item() for name, term in result.loss_terms.items()} == {
        "t/first": pytest.approx(first, rel=1e-12),
        "t/second": pytest.approx(second, rel=1e-12),
    }


@schedules
def test_nothing_that_is_returned_holds_a_graph_g5(schedule: str) -> None:
    model = MultiTaskModel(nn.Linear(3, 4), {"t": InTerms(nn.Linear(4, 2))}, inputs="x")
    result = Engine(model, sgd(model), schedule=schedule).step([{"x": torch.rand(7, 3)}] * 2)
    tensors = [*result.losses.values(), *result.loss_terms.values(), result.grad_norm]
    assert len(tensors) == 4
    assert all(not tensor.requires_grad and tensor.dim() == 0 for tensor in tensors)
    assert result.losses["t"].untyped_storage().nbytes() <= 8, "it would keep a larger tensor alive"


def test_200_steps_leave_no_tensor_with_a_graph_g5() -> None:
    model = plain_model()
    engine = Engine(model, torch.optim.Adam(model.parameters()))

    def tensors() -> tuple[int, int]:
        gc.collect()
        found = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
        return len(found), sum(tensor.grad_fn is not None for tensor in found)

    engine.step([plain_batch(4)])
    before, graphs = tensors()  # of other tests, perhaps
    kept = [engine.step([plain_batch(4, seed=step)]) for step in range(200)]
    # what a loop keeps of a step: three losses and a norm, and nothing behind them
    assert tensors() == (before + 200 * 4, graphs)
    assert all(result.stepped for result in kept)


@schedules
def test_the_step_reads_one_flag_whatever_the_number_of_micro_batches_g5(schedule: str) -> None:
    # each read would wait for the device; the counts are read in one go, before the first forward, and
    # whether all was finite in one flag, after the last backward
    reads: list[str] = []

    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            if "_local_scalar_dense" in name:
                reads.append("flag")
            assert "nonzero" not in name, "a shape depends on data"
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Linear(3, 8),
        {
            "cls": Classification(num_classes=4, head=nn.Linear(8, 4), class_weights=[1, 2, 3, 4]),
            "value": Regression(2, head=nn.Linear(8, 2), target="value"),
        },
        inputs="x",
    )
    batch = {k: v.float() if v.is_floating_point() else v for k, v in plain_batch(6, missing=0.4).items()}
    optimizer = sgd(model)
    engine = Engine(model, optimizer, schedule=schedule, max_grad_norm=1.0)
    real = label_counts._read

    def read(numbers: Any) -> list[float]:
        reads.append("counts")
        with torch.utils._python_dispatch._disable_current_modes():
            return real(numbers)

    with pytest.MonkeyPatch.context() as patch, Reads():
        patch.setattr(label_counts, "_read", read)
        engine.step(split_batch(batch, 3))
    assert reads == ["counts", "flag"]


# --- when something fails ---------------------------------------------------------------------------------


def failing_model(error: Exception) -> tuple[MultiTaskModel, Failing]:
    torch.manual_seed(0)
    bad = Failing(nn.Linear(4, 2), error)
    model = MultiTaskModel(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        {"first": Squared(nn.Linear(4, 2)), "bad": Squared(bad), "last": Squared(nn.Linear(4, 2))},
        inputs="x",
    )
    return model, bad


ERRORS = [RuntimeError("broken"), ValueError("broken"), torch.OutOfMemoryError("broken"), KeyboardInterrupt()]


@schedules
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_step_leaves_nothing_and_the_next_one_is_clean_g7(schedule: str, error: Any) -> None:
    window = split_batch({"x": torch.rand(6, 3)}, 2)
    model, bad = failing_model(error)
    clean, fine = failing_model(error)
    fine.broken = False
    optimizer = sgd(model, momentum=0.9)
    engine = Engine(model, optimizer, schedule=schedule)
    before = weights_of(model)

    with pytest.raises((TaskError, torch.OutOfMemoryError, KeyboardInterrupt)):
        engine.step(window)

    assert no_gradients(model)
    assert_equal_states(weights_of(model), before)
    assert optimizer.state == {}
    bad.broken = False
    engine.step(window)
    Engine(clean, sgd(clean, momentum=0.9), schedule=schedule).step(window)
    assert_equal_states(weights_of(model), weights_of(clean))


@schedules
@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_a_failed_accumulate_leaves_the_callers_gradients_bitwise_g7(schedule: str, error: Any) -> None:
    model, _ = failing_model(error)
    own = {name: torch.rand_like(p) for name, p in model.named_parameters() if "last" not in name}
    for name, parameter in model.named_parameters():
        parameter.grad = own[name].clone() if name in own else None
    with pytest.raises(TaskError, match="task 'bad'.*broken"):
        Engine(model, schedule=schedule).accumulate(
            split_batch({"x": torch.rand(6, 3)}, 2), restore_on_error=True
        )
    for name, gradient in gradients_of(model).items():
        assert (gradient is None) == (name not in own)
        assert gradient is None or torch.equal(gradient, own[name])


@pytest.mark.parametrize("where", ["on_gradients", "optimizer"])
def test_an_error_after_the_backwards_leaves_no_gradient_either_g7(where: str) -> None:
    model = plain_model()
    optimizer = sgd(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    if where == "optimizer":
        optimizer.register_step_pre_hook(fail)
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="broken"):
        Engine(model, optimizer, on_gradients=fail if where == "on_gradients" else None).step(
            [plain_batch(3)]
        )
    assert no_gradients(model)
    assert_equal_states(weights_of(model), before)


def test_a_label_out_of_range_is_found_before_any_forward_l5() -> None:
    model = plain_model()
    passes: list[None] = []
    model.trunk.register_forward_hook(lambda *_: passes.append(None))
    bad = plain_batch(4)
    bad["cls"][2] = 4
    with pytest.raises(LabelError, match=r"task 'cls': label 4 in micro-batch 1.*0 to 3.*-100.*'cls'"):
        Engine(model, sgd(model)).step([plain_batch(3), bad])
    assert passes == []
    assert no_gradients(model)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (lambda prediction: prediction, r"Tensor\(3, 2\)"),
        (lambda prediction: prediction.mean(0), r"Tensor\(2\)"),
        (lambda prediction: {}, "empty dict"),
        (lambda prediction: {"a": prediction}, r"Tensor\(3, 2\)"),
        (lambda prediction: None, "NoneType"),
        (lambda prediction: (prediction.mean(), 1), "tuple"),
    ],
)
@schedules
def test_a_loss_that_is_no_single_number_names_the_task(
    schedule: str, loss: Callable[[Tensor], Any], shown: str
) -> None:
    class Wrong(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Any:
            return loss(prediction)

    model = MultiTaskModel(nn.Linear(3, 2), {"seg": Wrong(nn.Identity())}, inputs="x")
    with pytest.raises(TaskError, match=rf"the loss of task 'seg', given Tensor\(3, 2\).*returned.*{shown}"):
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(3, 3)}])


def test_a_loss_that_fails_names_the_task_and_the_prediction() -> None:
    class Wrong(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(prediction, batch["y"])

    model = MultiTaskModel(nn.Linear(3, 2), {"seg": Wrong(nn.Identity())}, inputs="x")
    with pytest.raises(
        TaskError, match=r"the loss of task 'seg', given Tensor\(3, 2\): Expected input batch_size"
    ):
        Engine(model).accumulate([{"x": torch.rand(3, 3), "y": torch.zeros(2, dtype=torch.long)}])


@schedules
def test_a_head_that_does_not_fit_names_itself_and_the_features(schedule: str) -> None:
    model = MultiTaskModel(nn.Conv2d(3, 16, 1), {"seg": Squared(nn.Conv2d(64, 3, 1))}, inputs="x")
    with pytest.raises(
        TaskError, match=r"task 'seg' \(head Conv2d on 'trunk'\), given Tensor\(2, 16, 8, 8\)"
    ):
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(2, 3, 8, 8)}])


class Wrapped:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class WrappingTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Wrapped:
        return Wrapped(self.layer(x))


class UnwrappingHead(nn.Module):
    def forward(self, features: Wrapped) -> Tensor:
        return features.tensor


def test_features_of_an_unknown_type_are_refused_by_name_where_they_would_be_cut() -> None:
    model = MultiTaskModel(WrappingTrunk(), {"a": Squared(UnwrappingHead())}, inputs="x")
    with pytest.raises(FeatureError, match=r"Wrapped.*register_structure"):
        Engine(model).accumulate([{"x": torch.rand(2, 3)}])
    assert no_gradients(model)


@pytest.mark.parametrize("mode", ["train", "frozen", "detached"])
@schedules
def test_inputs_of_any_type_are_fine(schedule: str, mode: str) -> None:
    # they are cut nowhere: a graph library's batch, say
    class Trunk(nn.Linear):
        def forward(self, wrapped: Wrapped) -> Tensor:
            return super().forward(wrapped.tensor)

    model = MultiTaskModel(Trunk(3, 2), {"a": Squared(nn.Linear(2, 1), "y", mode=mode)}, inputs="graph")
    batch = {"graph": Wrapped(torch.rand(4, 3)), "y": torch.zeros(4)}
    Engine(model, schedule=schedule).accumulate([batch])
    assert (model.trunk.weight.grad is None) is (mode == "detached")


# --- what an engine refuses -------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Has only the name of the foreign wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)


class DeepSpeedEngine(DistributedDataParallel):
    pass


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, DeepSpeedEngine, nn.DataParallel])
def test_foreign_wrappers_are_refused_by_name(wrapper: type[nn.Module]) -> None:
    inside = MultiTaskModel(wrapper(nn.Linear(3, 2)), {"a": Squared(nn.Linear(2, 1))}, inputs="x")
    for model in (wrapper(plain_model()), inside):
        with pytest.raises(ConfigError, match=rf"wrapped by {wrapper.__name__}.*bare modules"):
            Engine(model)
        with pytest.raises(ConfigError, match=rf"the bare model.*wrapped by {wrapper.__name__}"):
            reduce_gradients(model)


@pytest.mark.parametrize("thing", [nn.Linear(1, 1), lambda x: x, None])
def test_anything_but_a_model_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigError, match="needs a MultiTaskModel.*split_backward"):
        Engine(thing)


def test_parameters_that_the_optimizer_lacks_are_named() -> None:
    model = plain_model()
    with pytest.raises(
        OptimizerError, match=r"8 trainable parameters: tasks\.cls\.head\.weight.* and 3 more"
    ):
        Engine(model, torch.optim.SGD(model.trunk.parameters(), lr=0.1))


def test_what_is_not_trained_need_not_be_held() -> None:
    model = plain_model(value=0.0)
    model.task("other").mode = "frozen"
    model.trunk.requires_grad_(False)
    optimizer = torch.optim.SGD(model.task("cls").parameters(), lr=0.1)
    engine = Engine(model, optimizer)
    model.task("value").weight = 1.0
    with pytest.raises(OptimizerError, match=r"tasks\.value\.head\.weight"):
        engine.step([plain_batch(3)])


def test_a_weight_that_an_idle_task_shares_with_another_must_be_held() -> None:
    model = awkward_model()
    model.task("left").mode = "off"
    tied = model.task("right").head.layer.weight
    rest = [parameter for parameter in model.parameters() if parameter is not tied]
    with pytest.raises(OptimizerError, match=r"1 trainable parameters: tasks\.right\.head\.layer\.weight"):
        Engine(model, torch.optim.SGD(rest, lr=0.1))


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    model = plain_model()
    with pytest.raises(OptimizerError, match=r"LBFGS\.step needs a closure"):
        Engine(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedule": "spilt"},
            r"unknown schedule 'spilt'\. Did you mean 'split'\?.*sequential, split, summed",
        ),
        ({"schedule": "auto"}, "sequential, split, summed"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number above 0, got 0.0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": NAN}, "max_grad_norm"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(plain_model(), **settings)


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    model = plain_model()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs a metric"):
        Engine(model, optimizer, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_step_without_an_optimizer_points_to_accumulate() -> None:
    with pytest.raises(OptimizerError, match=r"accumulate\(\)"):
        Engine(plain_model()).step([plain_batch(3)])


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (plain_batch(3), r"got dict\. For a single batch: \[batch\].*split_batch\(batch, K\)"),
        ((plain_batch(3),), "got tuple"),
        (torch.zeros(3), "got Tensor"),
        (iter([plain_batch(3)]), "got list_iterator"),
        ([torch.zeros(3, 3), torch.zeros(3)], r"looks like a batch. Wrap it: \[batch\]"),
    ],
)
def test_a_batch_in_place_of_a_window_is_refused(window: Any, message: str) -> None:
    model = plain_model()
    for call in (Engine(model).accumulate, Engine(model, sgd(model)).step):
        with pytest.raises(BatchError, match=message):
            call(window)


def test_bare_tensors_are_batches_where_the_inputs_are_a_function() -> None:
    model = MultiTaskModel(nn.Linear(3, 2), {"a": Squared(nn.Linear(2, 1))}, inputs=lambda batch: batch)
    result = Engine(model).accumulate([torch.rand(4, 3), torch.rand(2, 3)])
    assert result.counts == {"a": 6}


@pytest.mark.parametrize("weight", [-0.1, NAN, float("inf")])
def test_weights_that_can_not_be_are_refused_before_any_step(weight: float) -> None:
    model = plain_model()
    with pytest.raises(ConfigError, match="weight must be a finite number"):
        model.task("cls").weight = weight


def test_every_error_of_ours_is_a_value_error() -> None:
    for error in (BatchError, ConfigError, FeatureError, LabelError, OptimizerError, TaskError):
        assert issubclass(error, MtaccumError)
        assert issubclass(error, ValueError)


# --- losses that aren't means -----------------------------------------------------------------------------


class Dice(Squared):
    additive = False


def dice_model() -> MultiTaskModel:
    return MultiTaskModel(
        nn.Linear(3, 2), {"dice": Dice(nn.Linear(2, 1)), "a": Squared(nn.Linear(2, 1))}, inputs="x"
    )


def test_a_loss_that_is_no_mean_is_exact_with_one_micro_batch_l7() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(dice_model()).accumulate([{"x": torch.rand(4, 3)}])


def test_it_is_said_once_to_be_inexact_with_more_l7() -> None:
    engine = Engine(dice_model())
    window = [{"x": torch.rand(4, 3)}, {"x": torch.rand(2, 3)}]
    with pytest.warns(InexactWarning, match=r"loss of dice is not a mean over labels.*2 micro-batches"):
        engine.accumulate(window)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.accumulate(window)


# --- state ------------------------------------------------------------------------------------------------


@schedules
def test_the_engine_does_not_draw_random_numbers_of_its_own(schedule: str) -> None:
    model = plain_model()
    seed_everything(1)
    expected = torch.rand(3)
    seed_everything(1)
    Engine(model, sgd(model), schedule=schedule, max_grad_norm=1.0).step(split_batch(plain_batch(6), 2))
    assert torch.equal(torch.rand(3), expected)


def test_what_the_optimizer_holds_beside_the_model_is_cleared_and_counted_i4() -> None:
    """A learned weight of a loss: its gradient is the step's alone, and counts in the norm."""

    class Uncertain(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return torch.exp(-log_variance) * super().loss(prediction, batch) + log_variance

    log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model = MultiTaskModel(nn.Linear(3, 4), {"a": Uncertain(nn.Linear(4, 2))}, inputs="x").double()
    optimizer = torch.optim.SGD([*model.parameters(), log_variance], lr=0.0)
    seen: list[Tensor] = []
    engine = Engine(model, optimizer, on_gradients=lambda _: seen.append(log_variance.grad.clone()))  # type: ignore[union-attr]

    norms = [engine.step([plain_batch(5)]).grad_norm for _ in range(3)]

    assert log_variance.grad is None
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert norms[0] == norms[1] == norms[2]


def test_inference_mode_is_refused() -> None:
    model = plain_model()
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
        Engine(model, sgd(model)).step([plain_batch(5)])


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_no_grad_around_a_step_changes_nothing(schedule: str) -> None:
    one, two = plain_model(), plain_model()
    with torch.no_grad():
        Engine(one, sgd(one), schedule=schedule).step([plain_batch(5)])
    Engine(two, sgd(two), schedule=schedule).step([plain_batch(5)])
    assert_equal_states(weights_of(one), weights_of(two))


def test_hooks_that_want_the_whole_gradient_are_refused() -> None:
    model = plain_model()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(OptimizerError, match="post-accumulate-grad hook"):
        Engine(model, sgd(model))


class SparseTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_sparse_embeddings_step_and_add_to_dense_gradients(schedule: str) -> None:
    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Linear(4, 1), target="y")}
    model = MultiTaskModel(SparseTrunk(), tasks, inputs="ids")
    batch = {"ids": torch.tensor([1, 2, 2]), "y": torch.rand(3, 1)}
    weight = model.trunk.embedding.weight  # type: ignore[union-attr]
    Engine(model, schedule=schedule).accumulate([batch])
    assert weight.grad is not None
    expected = weight.grad.to_dense() + 1
    weight.grad = torch.ones_like(weight)
    Engine(model, schedule=schedule).accumulate([batch])
    torch.testing.assert_close(weight.grad.to_dense() if weight.grad.is_sparse else weight.grad, expected)

    model.zero_grad()
    result = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule).step([batch])
    assert result.grad_norm is not None
    assert result.grad_norm > 0


# --- parameters that nothing reaches ----------------------------------------------------------------------


def test_trainable_parameters_without_a_gradient_are_reported_once_b5() -> None:
    model = plain_model()
    model.trunk.register_parameter("lost", nn.Parameter(torch.ones(2)))
    model.task("cls").head.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.task("value").head.register_parameter("fixed", nn.Parameter(torch.ones(2), requires_grad=False))
    model.task("other").mode = "frozen"
    engine = Engine(model, sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step([{**plain_batch(6), "cls": None}])  # not all tasks have run
    with pytest.warns(
        UserWarning, match=r"no gradient reached 2 trainable.*trunk\.lost, tasks\.cls\.head\.unused\."
    ):
        engine.step([plain_batch(6)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step([plain_batch(6)])


def test_what_is_not_to_learn_is_not_missed_b3_b5() -> None:
    model = plain_model()
    for name in model.tasks:
        model.task(name).mode = "detached"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(model, sgd(model)).step([plain_batch(6)])
