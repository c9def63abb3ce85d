"""Values that aren't finite: found by one flag, undone whole, and named by a second run of the window."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SCHEDULE_NAMES,
    RandomState,
    Squared,
    assert_equal_states,
    awkward_batch,
    awkward_model,
    plain_batch,
    plain_model,
    seed_everything,
)
from torch import Tensor, nn

from mtaccum import ConfigError, Engine, MultiTaskModel, Neck, NonfiniteError, Task, TaskError
from mtaccum.engine.nonfinite import all_finite, is_finite

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
NAN, INF = float("nan"), float("inf")


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Everything:
    """All that a step may change: weights, buffers, gradients, optimizer, scheduler, every generator."""

    def __init__(self, engine: Engine) -> None:
        self.model = copy.deepcopy(engine.model.state_dict())
        self.gradients = [parameter.grad for parameter in engine.model.parameters()]
        self.optimizer = [
            value.clone()
            for state in engine.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        self.scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
        self.scaler = None if engine.scaler is None else engine.scaler.state_dict()
        self.random, self.python = RandomState(), random.getstate()
        self.steps = engine.steps

    def assert_equal(self, other: Everything) -> None:
        assert_equal_states(self.model, other.model)
        assert self.gradients == other.gradients == [None] * len(self.gradients)
        assert len(self.optimizer) == len(other.optimizer)
        assert all(torch.equal(one, two) for one, two in zip(self.optimizer, other.optimizer, strict=True))
        assert (self.scheduler, self.scaler, self.steps) == (other.scheduler, other.scaler, other.steps)
        assert self.random == other.random
        assert self.python == other.python


# --- places where something may go wrong ------------------------------------------------------------------


class Through(nn.Module):
    """A layer, and then a function."""

    def __init__(self, inputs: int, outputs: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        self.dropout = nn.Dropout(0.3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.dropout(self.norm(self.layer(x))))


class Ratio(Task):
    """A loss that divides by an entry of the batch."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return (prediction.square().mean(1) / batch["divisor"]).mean()


def model_with(place: str = "", bad: Callable[[Tensor], Tensor] = lambda x: x) -> MultiTaskModel:
    """trunk -- neck -- deep, and first and last on the trunk; ``bad`` is applied to what ``place`` gives."""
    torch.manual_seed(0)

    def through(name: str, inputs: int, outputs: int) -> Through:
        return Through(inputs, outputs, bad if name == place else torch.tanh)

    return MultiTaskModel(
        through("trunk", 3, 4),
        {
            "first": Squared(through("first", 4, 2)),
            "deep": Squared(through("deep", 5, 2), on="neck"),
            "last": Ratio(through("last", 4, 2), "divisor"),
        },
        inputs="x",
        necks={"neck": Neck(through("neck", 4, 5))},
    )


def batch_of(samples: int = 6, seed: int = 1, **entries: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 3, generator=generator), "divisor": torch.ones(samples), **entries}


def switched(function: Callable[[Tensor], Tensor]) -> tuple[list[bool], Callable[[Tensor], Tensor]]:
    """A function that does harm while its switch is on; otherwise tanh."""
    on = [True]
    return on, lambda x: function(x) if on[0] else torch.tanh(x)


def second_of_two(seed: int = 1) -> list[dict[str, Tensor]]:
    return [batch_of(seed=seed), batch_of(5, seed=seed + 10)]


PLACES: dict[str, tuple[str, str]] = {
    "trunk": ("first", r"the features of 'trunk' \(Tensor\(6, 4\)\) hold NaN or inf already"),
    "neck": ("deep", r"the features of 'neck' \(Tensor\(6, 5\)\) hold"),
    "first": ("first", r"the prediction of 'first' \(Tensor\(6, 2\)\) hold"),
    "deep": ("deep", r"the prediction of 'deep' \(Tensor\(6, 2\)\) hold"),
    "last": ("last", r"the prediction of 'last' \(Tensor\(6, 2\)\) hold"),
}


@pytest.mark.parametrize("place", PLACES)
@schedules
def test_a_bad_forward_is_named_by_task_micro_batch_and_origin(schedule: str, place: str) -> None:
    task, origin = PLACES[place]
    model = model_with(place, lambda x: x.exp() * INF)
    engine = Engine(model, sgd(model), schedule=schedule)
    with pytest.raises(
        NonfiniteError, match=rf"^step 1: the loss of task '{task}' is (inf|nan) in .*{origin}"
    ):
        engine.step([batch_of()])


@schedules
def test_bad_inputs_are_named_with_the_step_and_the_micro_batch(schedule: str) -> None:
    model = model_with()
    engine = Engine(model, sgd(model), schedule=schedule)
    engine.step([batch_of(seed=2)])
    engine.step([batch_of(seed=3)])
    bad = batch_of()
    bad["x"][2, 1] = NAN
    message = r"step 3: the loss of task 'first' is nan in micro-batch 2 of 4: the inputs in the batch hold"
    with pytest.raises(NonfiniteError, match=message):
        engine.step([batch_of(), batch_of(5), bad, batch_of()])


@schedules
def test_a_bad_loss_is_named_though_the_prediction_is_fine(schedule: str) -> None:
    model = model_with()
    bad = batch_of(5, divisor=torch.tensor([1.0, 1, 0, 1, 1]))
    message = r"task 'last' is inf in micro-batch 1 of 2: the prediction is finite: look for log, sqrt"
    with pytest.raises(NonfiniteError, match=message):
        Engine(model, sgd(model), schedule=schedule).step([batch_of(), bad])


@schedules
def test_a_bad_parameter_is_named_as_the_origin(schedule: str) -> None:
    model = model_with()
    with torch.no_grad():
        model.task("deep").head.layer.bias[1] = NAN
    message = r"the parameter tasks\.deep\.head\.layer\.bias holds NaN or inf itself, before the step"
    with pytest.raises(NonfiniteError, match=message):
        Engine(model, sgd(model), schedule=schedule).step([batch_of()])


@schedules
def test_a_bad_loss_with_fine_gradients_is_no_step_either(schedule: str) -> None:
    class Plus(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return prediction.mean() + batch["divisor"].sum().log()

    torch.manual_seed(0)
    tasks = {"a": Plus(nn.Linear(4, 1), None), "b": Squared(nn.Linear(4, 2))}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    before = weights_of(model)
    engine = Engine(model, sgd(model), schedule=schedule)
    with pytest.raises(NonfiniteError, match=r"loss of task 'a' is -inf.*the prediction is finite"):
        engine.step([batch_of(divisor=torch.zeros(6))])
    assert_equal_states(weights_of(model), before)


def test_a_prediction_that_its_own_task_ignores_is_not_blamed_for_another_loss() -> None:
    class Ignores(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return torch.ones(())

    head = nn.Linear(4, 2)
    tasks = {"ignores": Ignores(Through(4, 2, lambda x: x * NAN), None), "last": Ratio(head, "divisor")}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    with pytest.raises(NonfiniteError, match=r"loss of task 'last' is inf.*the prediction is finite"):
        Engine(model, sgd(model)).step([batch_of(divisor=torch.zeros(6))])


class Scores(nn.Module):
    """Adds a constant mask, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.mask = nn.Parameter(torch.tensor([0.0, -INF]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.mask).softmax(1)


@pytest.mark.parametrize("place", ["switched off", "a constant"])
def test_a_parameter_that_does_no_harm_is_not_blamed(place: str) -> None:
    torch.manual_seed(0)
    other = Squared(Scores()) if place == "a constant" else Squared(nn.Linear(4, 2), weight=0.0)
    if place == "switched off":
        nn.init.constant_(other.head.weight, NAN)
    tasks = {"other": other, "last": Ratio(nn.Linear(4, 2), "divisor")}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    engine = Engine(model, sgd(model))
    assert engine.step([batch_of()]).stepped
    with pytest.raises(NonfiniteError, match="the loss of task 'last' is inf in micro-batch 1 of 2"):
        engine.step([batch_of(), batch_of(divisor=torch.zeros(6))])


class MaskedAfter(Task):
    """Masks targets that are missing after the arithmetic: 0 * NaN in the backward."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        target = batch[self.target]
        errors = (prediction[:, 0] - target).square().sqrt()
        return torch.where(target.isnan(), 0, errors).sum() / len(target)

    def count(self, batch: Any) -> int:
        return len(batch[self.target])


def masked_model(mode: str = "train") -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {
        "fine": Squared(nn.Linear(4, 2)),
        "masked": MaskedAfter(nn.Linear(4, 1), "y", mode=mode),
        "other": Squared(nn.Linear(4, 2)),
    }
    return MultiTaskModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), tasks, inputs="x")


GAPS = {"x": torch.linspace(-1, 1, 12).reshape(4, 3), "y": torch.tensor([1.0, NAN, 0.5, 2.0])}
WHOLE = {"x": GAPS["x"] + 1, "y": torch.tensor([1.0, 0.0, 0.5, 2.0])}


@pytest.mark.parametrize(
    ("mode", "seen"), [("train", "tasks.masked."), ("frozen", "trunk.0."), ("detached", "tasks.masked.")]
)
@schedules
def test_a_finite_loss_with_a_nan_gradient_names_the_task_l2(schedule: str, mode: str, seen: str) -> None:
    model = masked_model(mode)
    engine = Engine(model, sgd(model), schedule=schedule)
    before = weights_of(model)
    message = (
        r"the gradient of task 'masked' is not finite in micro-batch 1 of 3, but its loss is "
        rf"\(seen at {seen}.*torch\.where on the inputs"
    )
    with pytest.raises(NonfiniteError, match=message):
        engine.step([WHOLE, GAPS, WHOLE])
    assert_equal_states(weights_of(model), before)


# --- raise: nothing was changed ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["trunk", "deep", "last"])
@schedules
def test_a_step_that_raises_leaves_everything_and_the_next_equals_a_clean_run_g7(
    schedule: str, place: str
) -> None:
    on, harm = switched(lambda x: x / 0)
    model, clean = model_with(place, harm), model_with(place, torch.tanh)

    def engine_of(model: MultiTaskModel) -> Engine:
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return Engine(model, optimizer, schedule=schedule, lr_scheduler=scheduler)

    seed_everything(5)
    random.seed(5)
    other = engine_of(clean)
    other.step(second_of_two())
    other.step(second_of_two(seed=3))

    seed_everything(5)
    random.seed(5)
    engine = engine_of(model)
    on[0] = False
    engine.step(second_of_two())
    before, on[0] = Everything(engine), True
    with pytest.raises(NonfiniteError, match="Nothing was changed"):
        engine.step(second_of_two(seed=2))
    after, on[0] = Everything(engine), False
    engine.step(second_of_two(seed=3))

    Everything(engine).assert_equal(Everything(other))
    after.assert_equal(before)


@pytest.mark.parametrize("culprit", ["loss", "on_gradients"])
def test_a_step_that_raises_leaves_the_scaler_as_it_was_too_g7(culprit: str) -> None:
    on, harm = switched(lambda x: x / 0)

    def on_gradients(model: MultiTaskModel) -> None:
        if on[0]:
            model.trunk.layer.weight.grad[0, 0] = NAN

    model = model_with("deep", harm if culprit == "loss" else torch.tanh)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    hook = on_gradients if culprit == "on_gradients" else None
    engine = Engine(model, sgd(model), scaler=scaler, on_gradients=hook)
    on[0] = False
    engine.step([batch_of()])
    before, on[0] = Everything(engine), True
    with pytest.raises(NonfiniteError, match="Nothing was changed"):
        engine.step([batch_of()])
    Everything(engine).assert_equal(before)
    on[0] = False
    assert engine.step([batch_of()]).stepped
    assert scaler.get_scale() == 64


@schedules
def test_no_hook_is_left_behind(schedule: str) -> None:
    model = model_with("neck", lambda x: x * NAN)
    with pytest.raises(NonfiniteError):
        Engine(model, sgd(model), schedule=schedule).step([batch_of()])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_nonfinite_error_is_a_floating_point_error_too() -> None:
    model = model_with("first", lambda x: x * NAN)
    with pytest.raises(FloatingPointError):
        Engine(model, sgd(model)).step([batch_of()])


@schedules
def test_an_error_in_the_second_run_leaves_nothing_either_g7(schedule: str) -> None:
    calls = [0]

    def fail_later(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 1:
            raise ValueError("broken")
        return x * NAN

    model = model_with("first", fail_later)
    engine = Engine(model, sgd(model), schedule=schedule)
    before = Everything(engine)
    with pytest.raises(TaskError, match="task 'first'.*broken"):
        engine.step([batch_of()])
    Everything(engine).assert_equal(before)
    assert not any(module._forward_hooks for module in model.modules())


# --- skip -------------------------------------------------------------------------------------------------


@schedules
def test_a_skipped_step_changes_nothing_and_is_counted_and_logged(
    schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    on, harm = switched(lambda x: x / 0)
    model = model_with("trunk", harm)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = Engine(model, optimizer, schedule=schedule, lr_scheduler=scheduler, on_nonfinite="skip")
    on[0] = False
    assert engine.step([batch_of()]).stepped
    on[0] = True
    before = Everything(engine)

    seed_everything(7)
    with caplog.at_level(logging.DEBUG, logger="mtaccum"):
        results = [engine.step(second_of_two()) for _ in range(3)]

    after, drawn = Everything(engine), RandomState()
    before.random = after.random  # the passes drew, and the next step draws on
    after.assert_equal(before)
    assert (engine.skipped_steps.total, engine.skipped_steps.in_a_row, engine.steps) == (3, 3, 1)
    for result in results:
        assert not result.stepped
        assert result.grad_norm is None
        assert "loss of task 'first'" in result.nonfinite
    assert [(record.name, record.levelname) for record in caplog.records] == [("mtaccum", "WARNING")] * 3
    assert caplog.records[0].getMessage() == f"skipped step 2: {results[0].nonfinite}"

    # the search for the place draws nothing of its own
    seed_everything(7)
    for _ in range(3):
        for batch in second_of_two():
            draw_as_one_pass(len(batch["x"]))
    assert RandomState() == drawn

    on[0] = False
    assert engine.step([batch_of()]).stepped
    assert (engine.skipped_steps.total, engine.skipped_steps.in_a_row, engine.steps) == (3, 0, 2)


def draw_as_one_pass(samples: int) -> None:
    """One dropout for each node of ``model_with``."""
    for width in (4, 2, 5, 2, 2):
        F.dropout(torch.ones(samples, width), 0.3)


@schedules
def test_a_skipped_nan_does_not_get_into_running_statistics(schedule: str) -> None:
    model, without = awkward_model(), awkward_model()
    bad = awkward_batch(4, seed=5)
    bad["image"][0] = NAN
    for one, windows in ((model, [awkward_batch(4), bad, awkward_batch(3)]), (without, None)):
        engine = Engine(one, sgd(one), schedule=schedule, on_nonfinite="skip")
        for batch in windows or [awkward_batch(4), awkward_batch(3)]:
            seed_everything(1)
            engine.step([awkward_batch(2), batch])
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert_equal_states(model.state_dict(), without.state_dict())


def test_too_many_skips_in_a_row_are_an_error() -> None:
    on, harm = switched(lambda x: x / 0)
    model = model_with("first", harm)
    engine = Engine(model, sgd(model), on_nonfinite="skip", max_skipped=3)
    for _ in range(2):  # a step in between starts the count again
        on[0] = True
        assert not engine.step([batch_of()]).stepped
        assert not engine.step([batch_of()]).stepped
        on[0] = False
        assert engine.step([batch_of()]).stepped
    on[0] = True
    engine.step([batch_of()])
    engine.step([batch_of()])
    before = Everything(engine)
    with pytest.raises(NonfiniteError, match=r"step 3: the loss of task 'first'.*3\. skipped step in a row"):
        engine.step([batch_of()])
    Everything(engine).assert_equal(before)
    assert engine.skipped_steps.total == 7


def test_a_gradient_that_is_nan_at_any_scale_ends_in_an_error_that_names_it_l2() -> None:
    # with a scaler it looks like an overflow at first, and halving doesn't help
    model = masked_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    engine = Engine(model, sgd(model), scaler=scaler, max_skipped=3)
    before = weights_of(model)
    for scale in (64, 32):
        result = engine.step([GAPS])
        assert result.nonfinite == f"the gradients overflowed at a loss scale of {scale}"
    with pytest.raises(NonfiniteError, match=r"the gradient of task 'masked'.*3\. skipped step in a row"):
        engine.step([GAPS])
    assert_equal_states(weights_of(model), before)


def test_a_scaler_that_is_switched_off_is_not_to_blame_l2() -> None:
    model = masked_model()
    engine = Engine(model, sgd(model), scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(NonfiniteError, match="the gradient of task 'masked'"):
        engine.step([GAPS])


def test_a_bad_loss_is_no_overflow_of_a_scaler() -> None:
    model = model_with()
    engine = Engine(model, sgd(model), scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    with pytest.raises(NonfiniteError, match="the loss of task 'last' is inf"):
        engine.step([batch_of(divisor=torch.zeros(6))])


# --- the second run sees what the first one saw -----------------------------------------------------------


class LogOfMask(nn.Module):
    """Infinite if a mask hits: (samples, 3) to (samples,)."""

    def __init__(self, rate: float, generator: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.rate, self.generator = rate, generator

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(())
        if self.generator == "torch":
            kept = F.dropout(one, self.rate)
        elif self.generator == "numpy":
            kept = one * float(np.random.rand() >= self.rate)
        else:
            kept = one * float(random.random() >= self.rate)
        return self.layer(x).mean(1) * 0 + kept.log()


@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
@pytest.mark.parametrize("place", ["trunk", "head"])
@schedules
def test_the_second_run_draws_the_same_numbers_s3(schedule: str, place: str, generator: str) -> None:
    # of 12 micro-batches the mask hits exactly one: another mask would name another, or find nothing
    torch.manual_seed(0)
    noisy = LogOfMask(0.1, generator)
    trunk, head = (noisy, nn.Identity()) if place == "trunk" else (nn.Linear(3, 3), noisy)
    tasks = {"a": Squared(nn.Dropout(0.5)), "b": Squared(head)}
    model = MultiTaskModel(trunk, tasks, inputs="x")
    window = [{"x": torch.ones(2, 3)}] * 12

    hits: list[int] = []
    seed = 0
    while len(hits) != 1:
        seed += 1
        seed_everything(seed)
        random.seed(seed)
        with torch.no_grad():
            outputs = [model(batch)["b"] for batch in window]
        hits = [index for index, output in enumerate(outputs) if not output.isfinite().all()]

    seed_everything(seed)
    random.seed(seed)
    task = "a" if place == "trunk" else "b"
    with pytest.raises(NonfiniteError, match=rf"'{task}' is (inf|nan) in micro-batch {hits[0]} of 12"):
        Engine(model, sgd(model), schedule=schedule).step(window)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@schedules
def test_the_second_run_draws_the_same_numbers_on_a_gpu_s3(schedule: str) -> None:
    class LogOfDropout(nn.Module):
        """Infinite where dropout hits one of four elements."""

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.ones(4, device=x.device), 0.05).log() + x.sum() * 0

    trunk = nn.Linear(3, 4)
    tasks = {"a": Squared(nn.Dropout(0.5)), "b": Squared(LogOfDropout())}
    model = MultiTaskModel(trunk, tasks, inputs="x").cuda()
    window = [{"x": torch.ones(2, 3)}] * 12
    hits: list[int] = []
    seed = 0
    while len(hits) != 1:
        seed += 1
        seed_everything(seed)
        with torch.no_grad():
            outputs = [model({"x": batch["x"].cuda()})["b"] for batch in window]
        hits = [index for index, output in enumerate(outputs) if not output.isfinite().all()]
    seed_everything(seed)
    before = torch.cuda.get_rng_state()
    with pytest.raises(NonfiniteError, match=rf"'b' is inf in micro-batch {hits[0]} of 12"):
        Engine(model, sgd(model), schedule=schedule).step(window)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@schedules
def test_the_second_run_starts_from_the_buffers_of_before_s1(schedule: str) -> None:
    class Third(nn.Module):
        """Infinite the third time that it runs."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return self.layer(x) / (self.runs != 3)

    torch.manual_seed(0)
    tasks = {"a": Squared(Third()), "b": Squared(nn.Linear(4, 2))}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x")
    engine = Engine(model, sgd(model), schedule=schedule, on_nonfinite="skip")
    result = engine.step([batch_of()] * 4)
    assert "loss of task 'a' is inf in micro-batch 2 of 4" in result.nonfinite
    assert model.task("a").head.runs == 0


@schedules
def test_recomputed_segments_are_searched_too(schedule: str) -> None:
    model = model_with("neck", lambda x: x / 0)
    engine = Engine(model, sgd(model), schedule=schedule, recompute=["trunk", "neck.layer", "last"])
    with pytest.raises(NonfiniteError, match="'deep'.*features of 'neck'"):
        engine.step([batch_of()])


# --- gradients that are not finite after all --------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["", "with a scaler"])
@pytest.mark.parametrize("reaction", ["raise", "skip"])
def test_what_on_gradients_breaks_is_its_own_fault(reaction: str, scaled: bool) -> None:
    broken = [False]

    def on_gradients(model: MultiTaskModel) -> None:
        if broken[0]:
            model.trunk.layer.weight.grad[0, 0] = NAN

    model = model_with()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    engine = Engine(model, sgd(model), on_gradients=on_gradients, on_nonfinite=reaction, scaler=scaler)
    engine.step([batch_of()])
    before, broken[0] = Everything(engine), True
    if reaction == "raise":
        with pytest.raises(NonfiniteError, match="step 2: on_gradients left gradients that are not finite"):
            engine.step([batch_of()])
    else:
        result = engine.step([batch_of()])
        assert not result.stepped
        assert result.nonfinite == "on_gradients left gradients that are not finite"
    assert_equal_states(model.state_dict(), before.model)
    assert scaler is None or scaler.get_scale() == 64  # no factor is to blame
    broken[0] = False
    assert engine.step([batch_of()]).stepped


@schedules
def test_a_norm_can_overflow_though_each_gradient_is_finite(schedule: str) -> None:
    class Huge(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return prediction.sum() * 3e38

    model = MultiTaskModel(nn.Linear(40, 1), {"a": Huge(nn.Identity(), None)}, inputs="x")
    nn.init.zeros_(model.trunk.weight)
    nn.init.zeros_(model.trunk.bias)
    batch = {"x": torch.ones(1, 40)}  # 41 gradients of 3e38 each: their norm is 2e39
    engine = Engine(model, sgd(model), schedule=schedule, max_grad_norm=1.0)
    before = weights_of(model)
    with pytest.raises(NonfiniteError, match="gradients are finite, but so large that their norm is not"):
        engine.step([batch])
    assert_equal_states(weights_of(model), before)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


class Root(Task):
    """The mean root of the first column plus an entry of the batch; at 0 its slope is infinite."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return (prediction[:, 0] * batch["factor"]).abs().sqrt().mean()


def sparse_model() -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {"fine": Squared(nn.Linear(4, 2)), "root": Root(nn.Identity(), None)}
    return MultiTaskModel(Words(), tasks, inputs="ids")


@schedules
def test_sparse_gradients_are_looked_at(schedule: str) -> None:
    model = sparse_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    ids = torch.tensor([1, 2, 2])
    assert engine.step([{"ids": ids, "factor": torch.tensor([1.0, 2, 3])}]).stepped
    before = weights_of(model)
    message = r"gradient of task 'root' is not finite in micro-batch 1 of 2.*seen at trunk\.words\.weight"
    with pytest.raises(NonfiniteError, match=message):
        engine.step(
            [{"ids": ids, "factor": torch.ones(3)}, {"ids": ids, "factor": torch.tensor([1.0, 0, 3])}]
        )
    assert_equal_states(weights_of(model), before)


@schedules
def test_sparse_gradients_are_clipped_with_the_others_n9(schedule: str) -> None:
    ids = torch.tensor([1, 2, 2])
    batch = {"ids": ids, "factor": torch.ones(3)}
    model, dense = sparse_model(), sparse_model()
    features = dense.trunk(ids)
    loss = dense.task("fine").head(features).square().mean() + features[:, 0].abs().sqrt().mean()
    loss.backward()
    gradients = {n: p.grad.to_dense() for n, p in dense.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    before = weights_of(model)

    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), schedule=schedule, max_grad_norm=norm / 2
    )
    result = engine.step([batch])

    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(before[name] - weight, gradients[name] / 2, rtol=1e-4, atol=1e-6)


# --- the small functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_finite(dtype: torch.dtype, value: float) -> None:
    fine, bad = torch.tensor([1.0, -2.0], dtype=dtype), torch.tensor([1.0, value], dtype=dtype)
    assert is_finite(fine)
    assert not is_finite(bad)
    assert is_finite(fine.to_sparse())
    assert not is_finite(bad.to_sparse())
    if dtype in (torch.float32, torch.float64):
        assert not is_finite(torch.complex(fine, bad))
    assert all_finite([fine[0], fine[1], torch.tensor(3)])
    assert not all_finite([torch.tensor(3.0), bad[1], fine[0]])


def test_whole_numbers_are_finite() -> None:
    for tensor in (torch.tensor([2**62]), torch.tensor([True]), torch.tensor([], dtype=torch.float32)):
        assert is_finite(tensor)


def test_an_uncoalesced_sum_may_be_infinite_though_its_summands_are_not() -> None:
    summands = torch.sparse_coo_tensor([[1, 1]], torch.tensor([3e38, 3e38]), (4,), check_invariants=True)
    assert not summands.is_coalesced()
    assert not is_finite(summands)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_nonfinite": "ignore"}, r"unknown on_nonfinite 'ignore'.*raise, skip"),
        ({"max_skipped": 0}, r"max_skipped must be a whole number of at least 1, got 0"),
        ({"max_skipped": 1.5}, r"max_skipped.*1\.5"),
        ({"max_skipped": None}, r"max_skipped.*None"),
        ({"max_skipped": True}, r"max_skipped.*True"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings: dict[str, Any], message: str) -> None:
    model = plain_model()
    with pytest.raises(ConfigError, match=message):
        Engine(model, sgd(model), **settings)


def test_skipping_belongs_to_steps() -> None:
    with pytest.raises(ConfigError, match=r"on_nonfinite belongs to step\(\)"):
        Engine(plain_model(), on_nonfinite="skip")


def test_accumulate_leaves_looking_to_the_loop() -> None:
    model = plain_model()
    bad = plain_batch(4)
    bad["x"][0] = NAN
    result = Engine(model).accumulate([bad])
    assert result.losses["cls"].isnan()
    assert result.nonfinite is None
