"""Between steps anything may change that a PyTorch loop may change; and a step happens or it doesn't."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Squared, joint_reference, plain_batch, plain_model
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mtaccum import (
    ConfigError,
    Engine,
    FeatureError,
    MultiTaskModel,
    OptimizerError,
    PredictionError,
    Task,
    TaskError,
    find_plan,
)
from mtaccum.errors import MeasureError
from mtaccum.memory import LiveBytes, measure_step


def two_heads(**modes: str) -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {name: Squared(nn.Linear(3, 2), mode=modes.get(name, "train")) for name in ("a", "b")}
    return MultiTaskModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), tasks, inputs="x")


BATCH = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}


def state_of(engine: Engine) -> Any:
    """All that a step may change, as it is."""
    return copy.deepcopy(
        (
            {name: parameter.detach() for name, parameter in engine.model.named_parameters()},
            dict(engine.model.named_buffers()),
            [optimizer.state_dict() for optimizer in engine.optimizers.all],
            torch.get_rng_state(),
            engine.steps,
        )
    )


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


# --- e1, e10: what can learn has to be held ---------------------------------------------------------------


def test_a_trunk_unfrozen_after_construction_is_noticed_e1() -> None:
    model = two_heads()
    model.trunk.requires_grad_(False)
    engine = Engine(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    engine.step([BATCH])
    model.trunk.requires_grad_(True)
    before = state_of(engine)
    with pytest.raises(OptimizerError, match=r"doesn't hold 4 trainable parameters: trunk\.0\.weight"):
        engine.step([BATCH])
    assert same(state_of(engine), before)
    engine.optimizers.all[0].add_param_group({"params": list(model.trunk.parameters())})
    assert engine.step([BATCH]).stepped
    assert not torch.equal(before[0]["trunk.0.weight"], model.trunk[0].weight)


def test_a_module_put_in_after_construction_is_noticed_e1() -> None:
    model = two_heads()
    engine = Engine(model, SGD(model.parameters(), lr=0.1))
    engine.step([BATCH])
    model.task("a").head = nn.Linear(3, 2)
    with pytest.raises(OptimizerError, match=r"doesn't hold 2 trainable parameters: tasks\.a\.head\.weight"):
        engine.step([BATCH])


def test_the_trunk_of_detached_tasks_may_be_missing_e10() -> None:
    model = two_heads(a="detached", b="detached")
    heads = [p for task in model.tasks_by_name().values() for p in task.parameters()]
    assert Engine(model, SGD(heads, lr=0.1)).step([BATCH]).stepped
    model.task("b").mode = "frozen"  # from it the trunk learns
    with pytest.raises(OptimizerError, match="doesn't hold 4 trainable parameters: trunk"):
        Engine(model, SGD(heads, lr=0.1))


# --- e3: several optimizers -------------------------------------------------------------------------------


def halves(model: MultiTaskModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_two_optimizers_step_together_with_one_norm_and_one_clip_e3(schedule: str) -> None:
    batches = [plain_batch(4, seed=seed) for seed in (1, 2)]
    one, other = plain_model(), plain_model()
    apart = [SGD(halves(one)[0], lr=0.1, momentum=0.9), SGD(halves(one)[1], lr=0.1, momentum=0.9)]
    together = SGD(other.parameters(), lr=0.1, momentum=0.9)
    engines = [
        Engine(one, apart, schedule=schedule, max_grad_norm=0.05),
        Engine(other, together, schedule=schedule, max_grad_norm=0.05),
    ]
    for _ in range(3):
        norms = [engine.step(batches).grad_norm for engine in engines]
        assert norms[0] is not None
        assert torch.equal(norms[0], norms[1])
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_muon_for_matrices_and_adamw_for_the_rest_e3() -> None:
    model, plain = plain_model(), plain_model()
    batches = [plain_batch(4)]

    def optimizers(of: MultiTaskModel) -> list[Optimizer]:
        matrices, rest = halves(of)
        return [torch.optim.Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]

    given = optimizers(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in given]
    engine = Engine(model, given, lr_scheduler=schedulers)
    by_hand = optimizers(plain)
    for step in range(3):
        result, report = measure_step(engine, batches)
        assert result.stepped
        assert report.by_kind["optimizer state"] > 0 or step == 0
        reference = joint_reference(plain, batches)
        for name, parameter in plain.named_parameters():
            parameter.grad = reference.gradients[name]
        for optimizer in by_hand:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_with_a_scaler_each_is_unscaled_once_e3() -> None:
    model = two_heads()
    matrices, rest = halves(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    unscaled: list[Any] = []
    plain_unscale = scaler.unscale_
    scaler.unscale_ = lambda optimizer: (unscaled.append(optimizer), plain_unscale(optimizer))  # type: ignore
    optimizers = [SGD(matrices, lr=0.1), SGD(rest, lr=0.1)]
    engine = Engine(model, optimizers, scaler=scaler)
    assert engine.step([BATCH]).stepped
    assert unscaled == optimizers
    assert engine.step([BATCH]).stepped


def test_several_optimizers_are_checked_e3() -> None:
    model = two_heads()
    matrices, rest = halves(model)
    with pytest.raises(OptimizerError, match="two optimizers hold the same parameter"):
        Engine(model, [SGD(model.parameters(), lr=0.1), SGD(rest, lr=0.1)])
    with pytest.raises(OptimizerError, match="doesn't hold 5 trainable"):
        Engine(model, [SGD(matrices, lr=0.1)])
    with pytest.raises(ConfigError, match="several in a list, or None; got str"):
        Engine(model, "AdamW")  # type: ignore[arg-type]


# --- e5, e6: a step happens or it doesn't -----------------------------------------------------------------


def test_a_scheduler_past_its_end_leaves_a_whole_step_e5() -> None:
    model, whole = two_heads(), two_heads()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    engine = Engine(model, optimizer, lr_scheduler=scheduler)
    reference = Engine(whole, SGD(whole.parameters(), lr=0.1))
    for step in range(3):
        reference.optimizers.all[0].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        reference.step([BATCH])
        if step < 2:
            engine.step([BATCH])
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        engine.step([BATCH])
    assert engine.steps == 3
    assert same(dict(model.state_dict()), dict(whole.state_dict()))
    assert all(parameter.grad is None for parameter in model.parameters())


class Failing(AdamW):
    """Raises at a chosen call of what makes its state, or after its update."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.where = ""

    def _init_group(self, *arguments: Any, **named: Any) -> Any:
        made = super()._init_group(*arguments, **named)
        if self.where == "state":
            raise torch.OutOfMemoryError("no memory for the state")
        return made

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.where == "after":
            raise RuntimeError("the card fell off the bus")
        return result


def test_out_of_memory_while_the_state_is_made_leaves_all_as_it_was_e6() -> None:
    model = two_heads()
    optimizer = Failing(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer)
    before = state_of(engine)
    optimizer.where = "state"
    with pytest.raises(torch.OutOfMemoryError):
        engine.step([BATCH])
    assert same(state_of(engine), before)
    assert len(optimizer.state) == 0
    optimizer.where = ""
    assert engine.step([BATCH]).stepped


def test_an_optimizer_that_fails_while_it_writes_is_said_and_refused_until_a_state_is_loaded_e6() -> None:
    model = two_heads()
    matrices, rest = halves(model)
    optimizer = Failing([{"params": matrices}, {"params": rest}], lr=0.1)
    engine = Engine(model, optimizer)
    engine.step([BATCH])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.where = "after"
    with pytest.raises(OptimizerError, match=r"fell off the bus.*group 0, 1 of the 2 of Failing has"):
        engine.step([BATCH])
    optimizer.where = ""
    with pytest.raises(OptimizerError, match="Load a state into the model and the optimizer"):
        engine.step([BATCH])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert engine.step([BATCH]).stepped
    assert engine.steps == 2


def test_of_two_optimizers_that_moved_and_that_failed_both_are_told_e3_e6() -> None:
    model = two_heads()
    matrices, rest = halves(model)
    second = Failing(rest, lr=0.1)
    second.where = "state"
    engine = Engine(model, [SGD(matrices, lr=0.1), second])
    with pytest.raises(OptimizerError, match="group 0 of the 1 of SGD has moved"):
        engine.step([BATCH])
    assert len(second.state) == 0


def test_an_interrupt_in_the_optimizer_stays_one_e6(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_heads()
    optimizer = SGD(model.parameters(), lr=0.1)
    engine, step = Engine(model, optimizer), optimizer.step

    def interrupted(*_: Any) -> None:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step([BATCH])
    with pytest.raises(OptimizerError, match=r"KeyboardInterrupt.*group 0 of the 1 of SGD has moved"):
        engine.step([BATCH])


PLACES: dict[str, Callable[[Engine], None]] = {
    "loss": lambda engine: setattr(engine.model.task("b"), "loss", _fail),
    "count": lambda engine: setattr(engine.model.task("b"), "count", _fail),
    "hook": lambda engine: setattr(engine, "on_gradients", _fail),
    "pre-hook": lambda engine: engine.optimizers.all[0].register_step_pre_hook(_fail),
}


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("as drawn")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_raises_before_the_optimizer_writes_leaves_all_as_it_was(place: str, steps: int) -> None:
    engine = Engine(model := two_heads(), AdamW(model.parameters(), lr=0.1))
    for _ in range(steps):
        engine.step([BATCH])
    before = state_of(engine)
    PLACES[place](engine)
    with pytest.raises(RuntimeError, match="as drawn"):
        engine.step([BATCH, BATCH])
    assert same(state_of(engine), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- e15: lazy modules ------------------------------------------------------------------------------------


def test_lazy_modules_are_to_be_run_first_e15() -> None:
    model = MultiTaskModel(nn.LazyLinear(3), {"a": Squared(nn.Linear(3, 1))}, inputs="x")
    with pytest.raises(ConfigError, match=r"lazy modules have no shapes yet: trunk\.weight.*model\(batch\)"):
        Engine(model)
    model(BATCH)
    assert Engine(model, SGD(model.parameters(), lr=0.1)).step([BATCH]).stepped


# --- e11, e14: onto gradients that are there ----------------------------------------------------------------


def heads_on_one(number: int) -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {f"t{i}": Squared(nn.Linear(64, 256)) for i in range(number)}
    return MultiTaskModel(nn.Linear(64, 64), tasks, inputs="x")


def test_accumulating_onto_gradients_keeps_one_set_of_them_e14() -> None:
    model = heads_on_one(8)
    engine = Engine(model, schedule="split")
    batch = {"x": torch.rand(2, 64)}
    engine.accumulate([batch])
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore
    at = {name: parameter.grad.data_ptr() for name, parameter in model.named_parameters()}  # type: ignore
    start = sum(p.nbytes * 2 for p in model.parameters())
    peaks = []
    for restore in (False, True):
        live = LiveBytes([model, *(p.grad for p in model.parameters()), batch["x"]])  # type: ignore[list-item]
        with live:
            engine.accumulate([batch], restore_on_error=restore)
        peaks.append(live.peak_bytes - start)
        assert {name: p.grad.data_ptr() for name, p in model.named_parameters()} == at  # type: ignore
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * first[name])
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert peaks[0] < 0.3 * gradients
    assert peaks[1] > gradients


@pytest.mark.parametrize("restore", [False, True])
def test_after_an_error_gradients_are_none_or_as_they_were_e14(restore: bool) -> None:
    model = two_heads()
    engine = Engine(model)
    engine.accumulate([BATCH])
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore
    model.task("b").loss = _fail  # type: ignore[method-assign]
    with pytest.raises(TaskError) as error:
        engine.accumulate([BATCH], restore_on_error=restore)
    if restore:
        assert same({name: parameter.grad for name, parameter in model.named_parameters()}, before)
        assert "None now" not in str(error.value)
    else:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert "All gradients are None now, those from before too; restore_on_error=True" in str(error.value)


def test_accumulating_into_gradients_of_16_bits_is_warned_of_once_e11(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = MultiTaskModel(nn.Linear(3, 2), {"a": Squared(nn.Linear(2, 1))}, inputs="x").bfloat16()
    batch = {"x": torch.rand(4, 3, dtype=torch.bfloat16)}
    engine = Engine(model)
    engine.accumulate([batch])
    assert not [w for w in recwarn if "16 bits" in str(w.message)]
    for _ in range(3):
        engine.accumulate([batch])
    assert len([w for w in recwarn if "added up in 16 bits" in str(w.message)]) == 1


# --- e4: hooks on features --------------------------------------------------------------------------------


class Hooking(nn.Module):
    """A head that halves what it sends back, by a hook on its features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, features: Tensor) -> Tensor:
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient / 2)
        output: Tensor = self.layer(features)
        return output


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_hook_on_features_is_its_heads_own_e4(schedule: str, first: str) -> None:
    torch.manual_seed(0)
    heads = {"a": Squared(Hooking()), "b": Squared(nn.Linear(3, 2))}
    model = MultiTaskModel(
        nn.Linear(3, 3), {name: heads[name] for name in sorted(heads, reverse=first == "b")}, inputs="x"
    )
    Engine(model, schedule=schedule).accumulate([BATCH])
    features = [model.trunk(BATCH["x"]) for _ in range(2)]
    losses = [model.task("a").head.layer(features[0]), model.task("b").head(features[1])]
    gradients = [
        torch.autograd.grad(loss.pow(2).mean(), [model.trunk.weight], retain_graph=True)[0] for loss in losses
    ]
    torch.testing.assert_close(model.trunk.weight.grad, gradients[0] / 2 + gradients[1])


# --- e7, e8: what can't be measured or cut ----------------------------------------------------------------


class OfItsGradient(nn.Module):
    """A head that reads its own gradient, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, features: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda sample: self.layer(sample).tanh().sum()))(features)
        output: Tensor = self.layer(features) + slope.sum(1, keepdim=True)
        return output


def test_a_head_that_uses_torch_func_trains_and_what_looks_into_it_says_why_not_e7() -> None:
    def build() -> MultiTaskModel:
        return MultiTaskModel(nn.Linear(3, 3), {"a": Squared(OfItsGradient())}, inputs="x")

    model = build()
    engine = Engine(model, SGD(model.parameters(), lr=0.1))
    assert engine.step([BATCH]).stepped
    before = state_of(engine)
    with pytest.raises(MeasureError, match=r"can't be measured: hooks on saved tensors .* torch\.func\.grad"):
        measure_step(engine, [BATCH])
    assert same(state_of(engine), before)
    with pytest.raises(PredictionError, match=r"nor measured.*torch\.func\.grad.*after tasks\.a\.head began"):
        find_plan(build, BATCH, build_optimizer=lambda m: SGD(m.parameters(), lr=0.1))


def test_a_training_goes_on_where_its_memory_cant_be_measured_e7(tmp_path: Path) -> None:
    (tmp_path / "funcs.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Head(nn.Module):\n"
        "    def __init__(self, channels):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(channels, 10)\n"
        "    def forward(self, maps):\n"
        "        x = maps.mean((2, 3))\n"
        "        g = torch.func.vmap(torch.func.grad(lambda v: self.layer(v).tanh().sum()))(x)\n"
        "        return self.layer(x) + g.sum(1, keepdim=True)\n"
    )
    head = "{_target_: funcs.Head, channels: 32}"
    command = [sys.executable, "-m", "mtaccum.train", "+tasks=[cls]", f"+tasks.cls.head={head}"]
    short = ["trainer.max_steps=3", "data.train.size=64", "data.val.size=16", f"hydra.run.dir={tmp_path}/run"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([*command, *short], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the peak is not measured, and the training goes on") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["peak_bytes"] is None
    assert summary["steps"] == 3


class OfEach(Task):
    """The mean square over the rows of each sample, of nested predictions."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return torch.stack([rows.square().mean() for rows in prediction.unbind()]).mean()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_features_are_right_or_refused_with_the_schedule_that_takes_them_e8(layout: Any) -> None:
    torch.manual_seed(0)
    tasks = {name: OfEach(nn.Linear(3, 1), None) for name in ("a", "b")}
    model = MultiTaskModel(nn.Linear(3, 3), tasks, inputs="x")
    rows = [torch.rand(n, 3) for n in (2, 5)]
    batch = {"x": torch.nested.nested_tensor(rows, layout=layout)}
    for schedule in ("summed", "sequential"):
        model.zero_grad()
        assert Engine(model, schedule=schedule).accumulate([batch]).counts == {"a": 2, "b": 2}
        loss = sum(model.task(n).head(model.trunk(r)).square().mean() / 2 for n in tasks for r in rows)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    with pytest.raises(FeatureError, match="features hold a nested tensor.*schedule='sequential'"):
        Engine(model, schedule="split").accumulate([batch])


# --- e2: tensors outside of the model ---------------------------------------------------------------------


class Weighted(Squared):
    """Its loss has a learned weight that is no parameter of it."""

    def __init__(self, head: nn.Module, log_weight: Tensor) -> None:
        super().__init__(head)
        self.outside = [log_weight]  # in a list, so that no module knows of it

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        (log_weight,) = self.outside
        return super().loss(prediction, batch) * log_weight.neg().exp() + log_weight


def weighted(make: Callable[[Tensor], Tensor]) -> tuple[MultiTaskModel, Tensor]:
    torch.manual_seed(0)
    outside = make(torch.zeros(()))
    heads = {"a": Weighted(nn.Linear(3, 2), outside), "b": Squared(nn.Linear(3, 2))}
    return MultiTaskModel(nn.Linear(3, 3), heads, inputs="x"), outside


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
@pytest.mark.parametrize("make", [nn.Parameter, lambda tensor: tensor.requires_grad_()])
def test_a_learned_weight_outside_of_the_model_is_trained_if_it_is_held_e2(schedule: str, make: Any) -> None:
    model, outside = weighted(make)
    before = copy.deepcopy(model.state_dict())
    engine = Engine(model, SGD(model.parameters(), lr=0.1), schedule=schedule)
    with pytest.raises(
        OptimizerError, match=r"'a' learns a \w+ outside of the model, Tensor\(\), that no optimizer"
    ):
        engine.step([BATCH])
    assert outside.grad is None
    assert same(dict(model.state_dict()), dict(before))
    engine = Engine(model, SGD([*model.parameters(), outside], lr=0.1), schedule=schedule)  # type: ignore[list-item]
    for _ in range(2):
        assert engine.step([BATCH]).stepped
        assert outside.grad is None
    assert outside.item() != 0


def test_a_tensor_outside_is_looked_for_when_its_task_runs_first_or_something_was_unfrozen_e2() -> None:
    model, _ = weighted(nn.Parameter)
    model.task("a").mode = "off"
    model.trunk.requires_grad_(False)
    engine = Engine(model, SGD(model.parameters(), lr=0.1))
    engine.step([BATCH])
    model.task("a").mode = "train"
    with pytest.raises(OptimizerError, match="'a' learns"):
        engine.step([BATCH])


def test_a_neck_or_trunk_that_reaches_outside_is_named_e2() -> None:
    outside = nn.Parameter(torch.ones(3))

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * outside

    model = MultiTaskModel(Scaled(), {"a": Squared(nn.Linear(3, 1))}, inputs="x")
    with pytest.raises(OptimizerError, match=r"'trunk' learns a Parameter outside of the model, Tensor\(3\)"):
        Engine(model, SGD(model.parameters(), lr=0.1)).step([BATCH])


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_leaves_that_a_forward_makes_for_itself_and_inputs_are_nobodys_e2(schedule: str) -> None:
    class Penalised(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            x = batch["x"].detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.head(x).sum(), x, create_graph=True)
            return super().loss(prediction, batch) + slope.square().mean() + (x * 2).sum() * 0

    model = MultiTaskModel(nn.Linear(3, 3), {"a": Penalised(nn.Linear(3, 2))}, inputs="x")
    engine = Engine(model, SGD(model.parameters(), lr=0.1), schedule=schedule)
    assert engine.step([{"x": BATCH["x"].clone().requires_grad_()}]).stepped


# --- e6: what an optimizer keeps in its state ---------------------------------------------------------------


class Counting(SGD):
    """Counts its steps by a number in the state, and may raise before or after writing its momentum."""

    where = ""

    def step(self, closure: Any = None) -> Any:
        for entry in self.state.values():
            entry["count"] = entry.get("count", 0) + 1
            if self.where == "momentum":
                entry["momentum_buffer"].add_(1)
        if self.where:
            raise RuntimeError("as drawn")
        return super().step(closure)


def test_numbers_in_the_state_are_put_back_and_written_momentum_counts_as_moved_e6() -> None:
    model = two_heads()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(model, optimizer)
    for _ in range(2):
        engine.step([BATCH])
    before = state_of(engine)
    optimizer.where = "before"
    with pytest.raises(RuntimeError, match="as drawn"):
        engine.step([BATCH])
    assert same(state_of(engine), before)
    optimizer.where = "momentum"
    with pytest.raises(OptimizerError, match="group 0 of the 1 of Counting has moved"):
        engine.step([BATCH])


def test_a_module_put_in_is_searched_for_tensors_outside_too_e2() -> None:
    model, outside = two_heads(), nn.Parameter(torch.zeros(()))
    optimizer = SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer)
    engine.step([BATCH])

    class Shifted(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features) + outside

    model.task("a").head = Shifted(3, 2)
    optimizer.add_param_group({"params": list(model.task("a").head.parameters())})
    with pytest.raises(OptimizerError, match="'a' learns a Parameter outside of the model"):
        engine.step([BATCH])
