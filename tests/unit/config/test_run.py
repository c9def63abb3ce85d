"""What options do: parameter groups, learning rates, K, epochs, loggers, resuming, loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mtaccum
from mtaccum import ConfigError
from mtaccum.config import Run, RunConfig, prepare, run_command
from mtaccum.config.optimizer import node_name
from mtaccum.train import train

SMALL = [
    "batch_size=8",
    "data.train.size=24",
    "data.val.size=8",
    "trainer.max_steps=2",
    "trainer.log_every=1",
]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A run that has been built by the command from overrides, and not started."""
    monkeypatch.chdir(tmp_path)

    def build(*overrides: str) -> Run:
        runs: list[Run] = []

        def keep(config: RunConfig) -> int:
            runs.append(prepare(config))
            return 0

        assert run_command("train", keep, ["+tasks=[seg,cls]", *SMALL, *overrides]) == 0
        return runs[0]

    return build


def settings_by_name(run: Run) -> dict[str, dict[str, Any]]:
    optimizer = run.trainer.engine.optimizer
    assert optimizer is not None
    names = {id(p): node_name(name) for name, p in run.trainer.model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


def test_groups_by_node_and_no_decay_on_norms_and_biases(prepared: Callable[..., Run]) -> None:
    run = prepared("optimizer.groups={trunk: {lr: 1e-4}, seg.head: {weight_decay: 0.5}}", "optimizer.lr=0.01")
    found = settings_by_name(run)

    assert set(found) == {node_name(name) for name, _ in run.trainer.model.named_parameters()}
    shapes = {node_name(name): p.dim() for name, p in run.trainer.model.named_parameters()}
    for name, group in found.items():
        assert group["initial_lr"] == (1e-4 if name.startswith("trunk.") else 0.01), name
        decay = 0.5 if name.startswith("seg.head.") else 0.05
        assert group["weight_decay"] == (decay if shapes[name] > 1 else 0.0), name


def test_norms_and_biases_decay_if_told_to(prepared: Callable[..., Run]) -> None:
    found = settings_by_name(prepared("optimizer.decay_norms_and_biases=true"))
    assert {group["weight_decay"] for group in found.values()} == {0.05}


@pytest.mark.parametrize(("scale", "factor"), [("none", 1), ("sqrt", 2**0.5), ("linear", 2)])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_learning_rate_follows_the_batch_and_not_k_n10(
    prepared: Callable[..., Run], scale: str, factor: float, accumulate: int
) -> None:
    # none is the default
    asked = [] if scale == "none" else [f"lr_schedule.scale={scale}", "lr_schedule.base_batch_size=4"]
    run = prepared(
        *asked,
        f"accumulate={accumulate}",
        "optimizer.lr=0.01",
        "optimizer.groups={cls: {lr: 0.1}}",
    )
    rates = {group["initial_lr"] for group in settings_by_name(run).values()}
    assert sorted(rates) == pytest.approx([0.01 * factor, 0.1 * factor])


def test_micro_batch_size_is_another_way_to_say_k(prepared: Callable[..., Run]) -> None:
    assert prepared("micro_batch_size=3").config.micro_batches == 3
    assert prepared("micro_batch_size=4").trainer.sampler.accumulate == 2
    assert prepared().config.micro_batches == 1


def test_how_many_samples_are_drawn_reaches_the_trainer(prepared: Callable[..., Run]) -> None:
    assert prepared().trainer.settings.pictures == 4
    assert prepared("trainer.pictures=0").trainer.settings.pictures == 0


def test_epochs_count_in_batches(prepared: Callable[..., Run]) -> None:
    run = prepared("trainer.max_steps=null", "trainer.epochs=3", "batch_size=10")
    assert run.trainer.settings.total_steps == 9  # 24 samples are 3 batches of at most 10


def test_modes_and_weights_reach_the_tasks(prepared: Callable[..., Run]) -> None:
    model = prepared("tasks.seg.weight=2", "tasks.cls.mode=frozen").trainer.model
    assert model.task("seg").weight == 2
    assert model.task("cls").mode == "frozen"


def test_a_neck_from_the_config(prepared: Callable[..., Run]) -> None:
    run = prepared(
        "necks={wide: {_target_: torch.nn.LazyConv2d, out_channels: 40, kernel_size: 1, on: trunk}}",
        "tasks.seg.on=wide",
    )
    assert run.trainer.model.paths["seg"] == ("trunk", "wide", "seg")
    assert run.config.tasks["seg"]["in_channels"] == 40
    assert run.config.tasks["cls"]["in_channels"] == 32


def test_preparing_changes_no_buffer_and_draws_no_random_number(prepared: Callable[..., Run]) -> None:
    one, two = prepared(), prepared()
    for name, value in one.trainer.model.state_dict().items():
        assert torch.equal(value, two.trainer.model.state_dict()[name]), name
        if "running_mean" in name:
            assert not value.any()


class Notes:
    """A logger of one's own, named by ``_target_``."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **scalars}) + "\n")

    def close(self) -> None:
        with self.path.open("a") as file:
            file.write("closed\n")


@pytest.fixture
def own_logger(monkeypatch: pytest.MonkeyPatch) -> str:
    import sys

    monkeypatch.setitem(sys.modules, "own_logging", sys.modules[Notes.__module__])
    return "own_logging.Notes"


def run(*overrides: str) -> int:
    return run_command("train", train, ["+tasks=[cls]", *SMALL, *overrides])


def test_loggers_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_logger: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(f"loggers=[{{_target_: {own_logger}, path: notes}}]", "hydra.run.dir=run") == 0

    *lines, last = (tmp_path / "notes").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2]
    assert last == "closed"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_logger_that_is_not_there_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("loggers=[{_target_: nope.Logger}]") == 2
    assert "nope.Logger" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_loading_takes_the_best_state_and_the_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run("trainer.max_steps=4", "trainer.eval_every=2", "trainer.ema_decay=0.5", "hydra.run.dir=run") == 0
    )
    folder = tmp_path / "run"
    best, last = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("best", "last"))
    best["average"][_a_bias(best["average"])] += 1.0  # so that the two differ whatever was learned
    torch.save(best, folder / "best.pt")

    for state, weights in (("best", best), ("last", last)):
        model = mtaccum.load(folder, state=state)
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights["average"][f"module.{name}"]), (state, name)
    for name, value in mtaccum.load(folder).state_dict().items():
        assert torch.equal(value, best["average"][f"module.{name}"]), name


def _a_bias(state: dict[str, torch.Tensor]) -> str:
    return next(name for name in state if name.endswith("bias"))


def test_what_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run in"):
        mtaccum.load(tmp_path)
    (tmp_path / "config.yaml").write_text("tasks: {}\n")
    with pytest.raises(ConfigError, match=r"unknown state 'bset'.*'best'"):
        mtaccum.load(tmp_path, state="bset")


def test_a_checkpoint_of_another_model_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("hydra.run.dir=run") == 0
    for override, named in (
        ("trunk.widths=[16,32]", "trunk.widths: [16, 32] (was [32, 64])"),
        ("optimizer.lr=1", "optimizer.lr: 1.0 (was 0.004)"),
        ("batch_size=4", "batch_size: 4 (was 8)"),
        ("trainer.ema_decay=0.9", "doesn't fit this config"),
    ):
        assert run("resume=run", "hydra.run.dir=other", "trainer.max_steps=4", override) == 2
        assert named in capfd.readouterr().err
        assert not (tmp_path / "other").exists()
    # how the batch is run is free, and so is the length
    assert (
        run("resume=run", "hydra.run.dir=other", "trainer.max_steps=4", "accumulate=2", "engine=summed") == 0
    )
