"""Precision: autocast around each node, and a loss scale that changes nothing but the rounding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SCHEDULE_NAMES,
    Reference,
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
from torch.utils.data import DataLoader

from mtaccum import ConfigError, Engine, MultiTaskModel, Task, split_batch
from mtaccum.data import MicroBatchSampler
from mtaccum.training import Trainer, TrainerSettings, load_checkpoint, save_checkpoint

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
halves = pytest.mark.parametrize("precision", ["bf16", "fp16"])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# bfloat16 rounds to 2^-9 and float16 to 2^-12, relatively; a gradient goes through some ten roundings
TOLERANCES = {"bf16": 10 * 2**-9, "fp16": 10 * 2**-12}

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def single(batch: Mapping[str, Tensor], device: str = "cpu") -> dict[str, Tensor]:
    """A batch in single precision: autocast leaves double alone."""
    return {
        key: (value.float() if value.is_floating_point() else value).to(device)
        for key, value in batch.items()
    }


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def joint_autocast(model: MultiTaskModel, window: Sequence[Any], dtype: torch.dtype) -> Reference:
    """All forwards of a window in one autocast, and one backward outside of it, on a copy of the model."""
    model = copy.deepcopy(model)
    model.zero_grad()
    tasks = {name: task for name, task in model.tasks_by_name().items() if task.enabled}
    counts = {name: [float(task.count(batch)) for batch in window] for name, task in tasks.items()}
    sums: dict[str, Tensor] = {}
    with torch.autocast(model.device.type, dtype):
        for index, batch in enumerate(window):
            active = [name for name in tasks if counts[name][index]]
            predictions = model(batch, tasks=[n for n in active if tasks[n].mode != "detached"])
            for name in [name for name in active if tasks[name].mode == "detached"]:
                with torch.no_grad():
                    features = model.trunk(model.inputs(batch))
                predictions[name] = tasks[name](features, batch)
                torch.clear_autocast_cache()  # that forward had no graph
            for name in active:
                label_losses = tasks[name].loss(predictions[name], batch).float() * counts[name][index]
                sums[name] = sums[name] + label_losses if name in sums else label_losses
    means = {name: total / sum(counts[name]) for name, total in sums.items()}
    torch.stack([tasks[name].weight * mean for name, mean in means.items()]).sum().backward()
    return Reference(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: mean.detach() for name, mean in means.items()},
        dict(model.named_buffers()),
    )


# --- the values -------------------------------------------------------------------------------------------


@devices
@halves
@schedules
def test_gradients_are_those_of_a_joint_backward_under_autocast(
    schedule: str, precision: str, device: str
) -> None:
    model = awkward_model().float().to(device)
    window = [single(awkward_batch(4), device), single(awkward_batch(3, seed=2), device)]
    seed_everything(3)
    reference = joint_autocast(model, window, DTYPES[precision])
    scaler = torch.amp.GradScaler(device, init_scale=2.0**7)

    seed_everything(3)
    result = Engine(
        model, schedule=schedule, precision=precision, scaler=scaler if precision == "fp16" else None
    ).accumulate(window)

    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        parameter.grad /= 2.0**7 if precision == "fp16" else 1.0
    assert_close_gradients(model, reference, TOLERANCES[precision])
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(reference.losses[name].item(), rel=TOLERANCES[precision])


@devices
@halves
@schedules
def test_recomputed_segments_run_again_in_the_same_precision(
    schedule: str, precision: str, device: str
) -> None:
    window = [single(awkward_batch(4), device), single(awkward_batch(3, seed=2), device)]
    gradients, buffers = [], []
    for recompute in ((), ("trunk", "trunk.conv", "deep", "seg.conv", "depth.norm", "noisy.layer")):
        model = awkward_model().float().to(device)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**7) if precision == "fp16" else None
        seed_everything(3)
        Engine(model, schedule=schedule, precision=precision, scaler=scaler, recompute=recompute).accumulate(
            window
        )
        gradients.append(gradients_of(model))
        buffers.append(dict(model.named_buffers()))
    if device == "cpu":  # kernels of a GPU may add in another order
        assert_equal_states(*gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    assert_equal_states(*buffers)


class Notes(nn.Module):
    """Notes what it sees, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.seen.append((x.dtype, enabled, dtype))
        return x


@halves
@schedules
def test_autocast_is_around_forward_and_loss_of_a_node_and_around_nothing_else(
    schedule: str, precision: str
) -> None:
    dtype = DTYPES[precision]
    places: dict[str, list[tuple[bool, torch.dtype]]] = {"loss": [], "backward": [], "inputs": []}

    def note(place: str) -> None:
        places[place].append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    class Noting(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            note("loss")
            assert prediction.dtype == dtype
            return super().loss(prediction, batch)

    def inputs(batch: Any) -> Tensor:
        note("inputs")
        return batch["x"]

    def backward(loss: Tensor) -> None:
        note("backward")
        loss.backward()

    trunk = nn.Sequential(Notes(), nn.Linear(3, 4), Notes())
    head = nn.Sequential(Notes(), nn.Linear(4, 2))
    model = MultiTaskModel(trunk, {"a": Noting(head), "b": Noting(nn.Linear(4, 2))}, inputs=inputs)

    Engine(model, schedule=schedule, precision=precision, backward=backward).accumulate(
        [{"x": torch.rand(5, 3)}] * 2
    )

    assert set(trunk[0].seen) == {(torch.float32, True, dtype)}
    assert set(trunk[2].seen) == set(head[0].seen) == {(dtype, True, dtype)}
    assert places["loss"] == [(True, dtype)] * 4
    assert len(places["backward"]) == (2 if schedule == "summed" else 4)
    for place in ("backward", "inputs"):
        assert not any(enabled for enabled, _ in places[place])
    assert not torch.is_autocast_enabled("cpu")


@schedules
def test_without_a_precision_nothing_is_cast(schedule: str) -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), Notes())
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 2))}, inputs="x")
    result = Engine(model, schedule=schedule).accumulate([{"x": torch.rand(5, 3)}])
    assert [(seen, enabled) for seen, enabled, _ in trunk[1].seen] == [(torch.float32, False)]
    assert result.losses["a"].dtype == torch.float32


@halves
@schedules
def test_whole_numbers_and_targets_are_never_cast(schedule: str, precision: str) -> None:
    # 257 and 1 + 2^-20 have no place in 16 bits; nor has the class 2049 in float16
    ids, target = torch.tensor([[257, 3, 2049]]), torch.tensor([1 + 2**-20])
    seen: list[Any] = []

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(2050, 4)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            seen.append(ids)
            return {"ids": ids, "words": self.words(ids)}

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            seen.append(features["ids"])
            return self.layer(features["words"]).mean((1, 2))

    class Error(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            seen.append(batch["ids"])
            assert batch["y"].dtype == torch.float32
            assert torch.equal(batch["y"], target)
            return (prediction.float() - batch["y"]).square().mean()

    model = MultiTaskModel(Words(), {"a": Error(Last(), "y"), "b": Error(Last(), "y")}, inputs="ids")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    Engine(model, schedule=schedule, precision=precision, scaler=scaler).accumulate(
        [{"ids": ids, "y": target}]
    )

    assert len(seen) >= 5
    assert all(tensor.dtype == torch.long and torch.equal(tensor, ids) for tensor in seen)
    gradient = model.trunk.words.weight.grad
    assert gradient.abs().sum(1).nonzero()[:, 0].tolist() == [3, 257, 2049]


# --- a weight that was cast without a graph leads nowhere -------------------------------------------------

# Autocast keeps what it has cast until it is left. Recent versions of PyTorch cast with a graph even where
# gradients are switched off; older ones, which mtaccum supports too, don't.


def half_detached() -> MultiTaskModel:
    """Its first task doesn't teach the trunk, so that the trunk's first forward may be without a graph."""
    torch.manual_seed(0)
    return MultiTaskModel(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh()),
        {"first": Squared(nn.Linear(8, 2), "d", mode="detached"), "second": Squared(nn.Linear(8, 2), "t")},
        inputs="x",
    )


def labelled(*targets: str, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 3, generator=random), **{target: torch.zeros(6) for target in targets}}


WINDOWS = {
    "both in one micro-batch": [labelled("d", "t")],
    "the detached one in the first, the other in the second": [labelled("d"), labelled("t", seed=2)],
    "changing": [labelled("d", "t"), labelled("d", seed=2), labelled("t", "d", seed=3), labelled("t")],
}


def users_autocast(on: bool) -> AbstractContextManager[Any]:
    # not torch.autocast(enabled=False), which keeps a cache for what is inside, too
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()


@pytest.mark.parametrize(
    ("precision", "around"),
    [("bf16", False), ("bf16", True), ("fp32", True)],
    ids=["bf16", "bf16 inside a user's autocast", "a user's autocast"],
)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@schedules
def test_no_weight_cast_without_a_graph_survives_b4(
    schedule: str, window: list[dict[str, Tensor]], precision: str, around: bool
) -> None:
    model = half_detached()
    reference = joint_autocast(model, window, torch.bfloat16)
    engine = Engine(model, schedule=schedule, precision=precision)
    with users_autocast(around):
        engine.accumulate(window)
    assert model.trunk[0].weight.grad is not None
    assert_close_gradients(model, reference, TOLERANCES["bf16"])


@schedules
def test_casts_without_a_graph_are_dropped_before_there_is_one(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test above, on any version of PyTorch."""
    events: list[str] = []
    clear = torch.clear_autocast_cache

    def note_and_clear() -> None:
        events.append("dropped")
        clear()

    model = half_detached()
    model.trunk.register_forward_pre_hook(
        lambda *_: events.append("graph" if torch.is_grad_enabled() else "no graph")
    )
    engine = Engine(model, schedule=schedule)
    monkeypatch.setattr(torch, "clear_autocast_cache", note_and_clear)
    with users_autocast(True):
        engine.accumulate(WINDOWS["the detached one in the first, the other in the second"])
    ran = events.index("no graph")
    assert events[ran : ran + 3] == ["no graph", "dropped", "graph"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@schedules
def test_no_weight_cast_before_a_step_is_used_after_it(schedule: str, precision: str) -> None:
    # a user's autocast around the loop keeps what was cast until it is left, and a step changes the weights
    weights = []
    for around in (False, True):
        model = half_detached()
        engine = Engine(model, sgd(model, lr=0.5), schedule=schedule, precision=precision)
        with users_autocast(around):
            for _ in range(3):
                with users_autocast(True):
                    engine.step([labelled("t", "d")])
        weights.append(weights_of(model))
    assert_equal_states(*weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@schedules
def test_casts_do_not_pass_between_a_window_and_what_is_around_it(schedule: str, precision: str) -> None:
    # a user's autocast, in which weights are changed and the model is used between windows
    model = half_detached()
    engine = Engine(model, schedule=schedule, precision=precision)
    batch = labelled("t", "d")
    with users_autocast(True):
        engine.accumulate([batch])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
        between = model(batch)["second"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.25)
        model.zero_grad()
        engine.accumulate([batch])
    gradients = gradients_of(model)

    fresh = half_detached()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(0.5)
    with users_autocast(True):
        assert torch.equal(fresh(batch)["second"], between)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.sub_(0.25)
    with users_autocast(True):
        Engine(fresh, schedule=schedule, precision=precision).accumulate([batch])
    assert_equal_states(gradients, gradients_of(fresh))


# --- scaling ----------------------------------------------------------------------------------------------


class CountingScaler(torch.amp.GradScaler):
    """A scaler that tells what is asked of it."""

    def __init__(self, events: list[str], **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self.events = events

    def scale(self, outputs: Any) -> Any:
        self.events.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append("unscale")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.events.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        self.events.append("update")
        super().update(new_scale)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("tasks", [1, 3])
@schedules
def test_one_unscale_one_step_one_update_whatever_k_and_t_a1_b1(
    schedule: str, tasks: int, micro_batches: int
) -> None:
    # the optimizer steps after the backwards of all tasks, never between two
    events: list[str] = []
    model = plain_model(**({} if tasks == 3 else {"cls": 0.0, "other": 0.0})).float()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: events.append("optimizer"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: [events.append("tick"), 1.0][1] if epoch else 1.0
    )

    def backward(loss: Tensor) -> None:
        events.append("backward")
        loss.backward()

    engine = Engine(
        model,
        optimizer,
        schedule=schedule,
        scaler=CountingScaler(events, init_scale=4.0),
        max_grad_norm=0.01,
        lr_scheduler=scheduler,
        on_gradients=lambda _: events.append("gradients"),
        backward=backward,
    )
    result = engine.step(split_batch(single(plain_batch(6)), micro_batches))

    assert result.stepped
    passes = micro_batches * (1 if schedule == "summed" else tasks)
    once = ["unscale", "gradients", "step", "optimizer", "update", "tick"]
    assert events == ["scale", "backward"] * passes + once

    events.clear()
    engine.step([{"x": torch.rand(3, 3)}])  # without a label nothing is asked of it
    assert events == []


def test_without_an_optimizer_gradients_stay_scaled_and_the_scaler_is_the_loops() -> None:
    events: list[str] = []
    model = plain_model()
    reference = joint_reference(model, [plain_batch(6)])
    Engine(model, scaler=CountingScaler(events, init_scale=8.0)).accumulate([plain_batch(6)])
    for parameter in model.parameters():
        parameter.grad /= 8
    assert_close_gradients(model, reference, 1e-12)
    assert set(events) == {"scale"}


@pytest.mark.parametrize("micro_batches", [1, 3])
@schedules
def test_same_norm_and_same_clipped_update_at_scale_1_and_1024_a4(schedule: str, micro_batches: int) -> None:
    window = split_batch(plain_batch(9), micro_batches)
    reference = joint_reference(plain_model(), window).gradients
    norm = torch.stack([gradient.norm() for gradient in reference.values()]).norm().item()
    weights = []
    for scale in (None, 1.0, 1024.0):
        model = plain_model()
        before = weights_of(model)
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        engine = Engine(model, sgd(model, lr=1.0), schedule=schedule, scaler=scaler, max_grad_norm=norm / 3)
        result = engine.step(window)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-12)
        for name, weight in model.named_parameters():
            # torch divides by norm + 1e-6
            torch.testing.assert_close(before[name] - weight, reference[name] / 3, rtol=1e-5, atol=1e-12)
        weights.append(weights_of(model))
    # powers of 2 round nothing
    assert_equal_states(weights[0], weights[1])
    assert_equal_states(weights[0], weights[2])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_unscales_by_itself_does_not_do_it_again_a1(kind: Any) -> None:
    weights = []
    for scale in (1.0, 1024.0):
        model = plain_model().float()
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        Engine(model, optimizer, scaler=scaler, max_grad_norm=0.1).step([single(plain_batch(6))])
        weights.append(weights_of(model))
    assert_equal_states(*weights)


class Tiny(Task):
    """The mean prediction times a factor of the batch, in float32."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return prediction.float().mean() * batch["factor"]


def tiny_model(**heads: nn.Module) -> MultiTaskModel:
    """A trunk that passes its input on, and heads without activations: gradients are seen by eye."""
    trunk = nn.Linear(2, 2, bias=False)
    nn.init.eye_(trunk.weight)
    for head in heads.values():
        nn.init.ones_(head.weight)
    return MultiTaskModel(trunk, {name: Tiny(head, None) for name, head in heads.items()}, inputs="x")


@schedules
def test_fp16_keeps_gradients_that_are_too_small_for_it(schedule: str) -> None:
    # 1e-8 lies below 6e-8, the smallest number of float16; 65536 times as much doesn't
    batch = {"x": torch.ones(1, 2), "factor": 1e-8}
    updates = []
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        model = tiny_model(a=nn.Linear(2, 1, bias=False))
        engine = Engine(model, sgd(model, lr=1e8), schedule=schedule, precision="fp16", scaler=scaler)
        assert engine.step([batch]).stepped
        updates.append(1 - model.task("a").head.weight)
    torch.testing.assert_close(updates[0], torch.ones(1, 2), rtol=1e-3, atol=0)
    assert torch.equal(updates[1], torch.zeros(1, 2)), "without a scale it is lost"


def test_fp16_finds_its_factor_by_leaving_out_steps_a2(caplog: pytest.LogCaptureFixture) -> None:
    # the gradient at the output is the factor itself: 65536 is beyond float16, 32768 is not
    model = tiny_model(a=nn.Linear(2, 1, bias=False))
    optimizer = sgd(model, lr=1.0)
    engine = Engine(model, optimizer, precision="fp16")
    batch = {"x": torch.ones(1, 2), "factor": 1.0}
    before = weights_of(model)
    caplog.set_level("INFO", logger="mtaccum")

    result = engine.step([batch])

    assert not result.stepped
    assert result.nonfinite is not None
    assert "overflowed at a loss scale of 65536" in result.nonfinite
    assert [record.levelname for record in caplog.records] == ["INFO"]  # it belongs to the method
    assert_equal_states(weights_of(model), before)
    assert (engine.steps, engine.skipped_steps.total) == (0, 1)

    assert engine.step([batch]).stepped
    assert engine.scaler.get_scale() == 32768
    assert (engine.steps, engine.skipped_steps.in_a_row) == (1, 0)
    torch.testing.assert_close(model.task("a").head.weight, torch.zeros(1, 2))  # the gradient is 1


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("order", [("fine", "over"), ("over", "fine")])
@schedules
def test_an_overflow_in_one_of_two_tasks_skips_the_whole_step_a2(
    schedule: str, order: tuple[str, str], micro_batches: int
) -> None:
    class Over(Tiny):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return prediction.square().mean() * batch["factor"]

    torch.manual_seed(0)
    tasks = {"fine": Squared(nn.Linear(4, 2)), "over": Over(nn.Linear(4, 2), None)}
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    model = MultiTaskModel(trunk, {name: tasks[name] for name in order}, inputs="x")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = Engine(
        model,
        optimizer,
        schedule=schedule,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
        lr_scheduler=scheduler,
    )
    x = torch.rand(6, 3)
    assert engine.step([{"x": x, "factor": 1.0}]).stepped
    # momentum and running statistics are there from here on
    before, state = copy.deepcopy(model.state_dict()), state_of(optimizer)
    rates = scheduler.get_last_lr()

    # a finite loss near 1e37 is beyond float32 when it is scaled; only the last micro-batch's is
    window = [{"x": x, "factor": 1.0}] * (micro_batches - 1) + [{"x": x, "factor": 1e37}]
    result = engine.step(window)

    assert not result.stepped
    assert all(torch.isfinite(loss) for loss in result.losses.values())
    assert_equal_states(model.state_dict(), before)
    assert all(torch.equal(one, two) for one, two in zip(state_of(optimizer), state, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert scheduler.get_last_lr() == rates == [0.0005]
    assert engine.scaler.get_scale() == 512
    assert engine.steps == 1

    assert engine.step([{"x": x, "factor": 1.0}]).stepped
    assert scheduler.get_last_lr() == [0.00025]


def trainer(folder: Path, scaler: Any) -> Trainer:
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 4), {"a": Squared(nn.Linear(4, 2))}, inputs="x")
    data = [{"x": torch.rand(3)} for _ in range(12)]
    sampler = MicroBatchSampler(12, 4, 1)
    return Trainer(
        Engine(model, sgd(model), precision="fp16", scaler=scaler),
        DataLoader(data, batch_sampler=sampler),  # type: ignore[arg-type]
        sampler,
        DataLoader(data, batch_size=4),  # type: ignore[arg-type]
        TrainerSettings(total_steps=5),
        folder,
    )


def test_the_scalers_state_is_saved_and_comes_back_a3(tmp_path: Path) -> None:
    # 64 doubles after two steps and again after four; the fifth is counted
    first = trainer(tmp_path, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    first.fit()
    save_checkpoint(first.state_dict(), tmp_path / "state.pt")

    second = trainer(tmp_path, None)
    assert second.engine.scaler.get_scale() == 65536
    second.load_state_dict(load_checkpoint(tmp_path / "state.pt"))

    assert second.engine.scaler.get_scale() == 256
    assert second.engine.scaler.state_dict() == first.engine.scaler.state_dict()
    assert second.engine.scaler.state_dict()["_growth_tracker"] == 1


# --- when a step fails or has nothing to do ---------------------------------------------------------------


@pytest.mark.parametrize("where", ["on_gradients", "optimizer", "backward"])
def test_a_failed_step_leaves_the_scaler_ready_for_the_next_g7(where: str) -> None:
    broken = [True]

    def fail(*_: Any) -> None:
        if broken[0]:
            raise RuntimeError("broken")

    def backward(loss: Tensor) -> None:
        loss.backward()
        if where == "backward":
            fail()

    model, clean = plain_model(), plain_model()
    optimizer = sgd(model)
    if where == "optimizer":
        optimizer.register_step_pre_hook(fail)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    engine = Engine(
        model,
        optimizer,
        scaler=scaler,
        on_gradients=fail if where == "on_gradients" else None,
        backward=backward,
    )
    engine.step([{"x": torch.rand(2, 3, dtype=torch.float64)}])  # no label
    with pytest.raises(RuntimeError, match="broken"):
        engine.step([plain_batch(6)])
    broken[0] = False

    result = engine.step([plain_batch(6)])

    assert result.stepped
    assert scaler.get_scale() == 64
    Engine(clean, sgd(clean)).step([plain_batch(6)])
    assert_equal_states(weights_of(model), weights_of(clean))


def test_a_loss_without_a_gradient_is_a_step_with_a_scaler_too() -> None:
    class Constant(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return torch.tensor(4.0)

    model = MultiTaskModel(nn.Linear(3, 2), {"a": Constant(nn.Linear(2, 1), None)}, inputs="x")
    before = weights_of(model)
    for scaler in (None, torch.amp.GradScaler("cpu")):
        result = Engine(model, sgd(model), scaler=scaler).step([{"x": torch.rand(2, 3)}])
        assert result.losses["a"].item() == 4.0
        assert_equal_states(weights_of(model), before)


# --- what is refused --------------------------------------------------------------------------------------


@halves
def test_a_precision_that_does_nothing_is_refused_or_warned_of(precision: str) -> None:
    # autocast leaves parameters in float64 alone
    model = plain_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Engine(model, sgd(model), precision=precision).step([plain_batch(4)])
        except ConfigError:
            return
    assert [warning for warning in caught if "float64" in str(warning.message)]


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown precision 'bf6'\. Did you mean 'bf16'\?.*bf16, fp16, fp32"
    ):
        Engine(plain_model(), precision="bf6")


@pytest.mark.parametrize("scaler", [True, 1024.0, "auto"])
def test_what_is_no_scaler_is_refused_by_type(scaler: Any) -> None:
    with pytest.raises(ConfigError, match=rf"torch\.amp\.GradScaler or None, got {type(scaler).__name__}"):
        Engine(plain_model(), scaler=scaler)


def test_fp16_without_any_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16.*pass the scaler.*backward="):
        Engine(plain_model(), precision="fp16")


@pytest.mark.parametrize(
    "settings",
    [{"scaler": torch.amp.GradScaler("cpu")}, {"backward": lambda loss: (loss * 64).backward()}],
    ids=["scaler", "backward"],
)
def test_fp16_in_a_loop_of_ones_own_scales_in_one_way_or_the_other(settings: dict[str, Any]) -> None:
    model = plain_model().float()
    Engine(model, precision="fp16", **settings).accumulate([single(plain_batch(4))])
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_fp16_with_an_optimizer_brings_a_scaler_and_keeps_a_given_one() -> None:
    model = plain_model().float()
    assert Engine(model, sgd(model), precision="fp16").scaler.get_scale() == 65536
    mine = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert Engine(model, sgd(model), precision="fp16", scaler=mine).scaler is mine
    for precision in ("fp32", "bf16"):
        assert Engine(model, sgd(model), precision=precision).scaler is None


def test_parameters_in_float16_are_refused_by_name_where_losses_are_scaled() -> None:
    model = plain_model().float()
    model.task("cls").head.half()
    with pytest.raises(ConfigError, match=r"tasks\.cls\.head\.weight.*float16.*model\.float\(\)"):
        Engine(model, sgd(model), scaler=torch.amp.GradScaler("cpu"))
    model.task("cls").head.requires_grad_(False)  # what isn't trained isn't unscaled
    Engine(model, sgd(model), scaler=torch.amp.GradScaler("cpu"))
