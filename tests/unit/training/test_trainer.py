"""The loop: what is tied to optimizer steps, which state is the best, and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mtaccum import BatchError, Classification, Engine, MultiTaskModel, NonfiniteError, Regression, evaluate
from mtaccum.data import MicroBatchSampler
from mtaccum.training import Trainer, TrainerSettings, load_checkpoint

SAMPLES = 24


def samples(labelled: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(SAMPLES):
        x = torch.rand(4, generator=generator)
        y = x.sum() if labelled else torch.tensor(float("nan"))
        made.append({"x": x, "cls": (x[0] > x[1]).long() if labelled else torch.tensor(-100), "y": y})
    return made


def make(folder: Path, labelled: bool = True, accumulate: int = 1, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    tasks = {
        "cls": Classification(2, head=nn.Linear(8, 2), target="cls"),
        "y": Regression(head=nn.Linear(8, 1), target="y", weight=0.5),
    }
    model = MultiTaskModel(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), tasks, inputs="x")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = samples(labelled)
    sampler = MicroBatchSampler(SAMPLES, 6, accumulate)
    return Trainer(
        Engine(model, optimizer, lr_scheduler=scheduler),
        DataLoader(data, batch_sampler=sampler),  # type: ignore[arg-type]
        sampler,
        DataLoader(data, batch_size=7),  # type: ignore[arg-type]
        TrainerSettings(**{"total_steps": 8, "log_every": 1, **settings}),
        folder,
        [Notes()],
    )


class Notes:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.lines.append((step, dict(scalars)))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_schedule_and_average_follow_optimizer_steps_n7_n8(tmp_path: Path, accumulate: int) -> None:
    trainer = make(tmp_path, accumulate=accumulate, ema_decay=0.5)

    outcome = trainer.fit()

    assert outcome.steps == 8
    assert outcome.micro_batches == 8 * accumulate
    assert outcome.samples == 48
    assert trainer.engine.lr_scheduler is not None
    assert trainer.engine.lr_scheduler.last_epoch == 8
    assert trainer.average is not None
    assert int(trainer.average.n_averaged) == 8


def test_averaged_weights_are_what_is_evaluated_and_loaded(tmp_path: Path) -> None:
    trainer = make(tmp_path, ema_decay=0.9)
    outcome = trainer.fit()
    data = DataLoader(samples(), batch_size=7)  # type: ignore[arg-type]

    assert evaluate(trainer.evaluated_model, data) == outcome.evaluation
    assert evaluate(trainer.model, data)["y"]["loss"] != outcome.evaluation["y"]["loss"]


def test_patience_ends_the_training_and_best_is_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, total_steps=50, eval_every=1, patience=3)
    for group in trainer.engine.optimizer.param_groups:  # type: ignore[union-attr]
        group["lr"] = group["initial_lr"] = 0.0
    trainer.engine.lr_scheduler = None

    outcome = trainer.fit()

    assert outcome.steps == 4  # the first is the best, and three are no better
    assert load_checkpoint(tmp_path / "best.pt")["progress"]["steps"] == 1
    assert load_checkpoint(tmp_path / "last.pt")["progress"]["steps"] == 4


def test_monitor_may_be_maximized(tmp_path: Path) -> None:
    trainer = make(tmp_path, eval_every=2, monitor="cls/accuracy", maximize=True)
    trainer.fit()
    logged = {s: line["val/cls/accuracy"] for s, line in trainer.loggers[0].lines if "val/loss" in line}  # type: ignore[attr-defined]

    best = load_checkpoint(tmp_path / "best.pt")["progress"]
    assert best["best"] == max(logged.values())
    assert logged[best["steps"]] == best["best"]


def test_an_epoch_without_labels_is_an_error_and_not_an_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="no label of any task"):
        make(tmp_path, labelled=False).fit()


def test_evaluation_is_the_mean_over_labels_and_leaves_the_model_alone(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    model = trainer.model
    model.trunk.eval()  # type: ignore[union-attr]
    data = samples()
    data[3]["cls"] = torch.tensor(-100)
    data[5]["y"] = torch.tensor(float("nan"))
    whole = torch.utils.data.default_collate(data)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    found = evaluate(model, DataLoader(data, batch_size=5))  # type: ignore[arg-type]

    predictions = model(whole)
    valid = whole["cls"] != -100
    expected = nn.functional.cross_entropy(predictions["cls"][valid], whole["cls"][valid])
    assert found["cls"]["loss"] == pytest.approx(expected.item(), rel=1e-6)
    accuracy = (predictions["cls"].argmax(1) == whole["cls"])[valid].float().mean()
    assert found["cls"]["accuracy"] == pytest.approx(accuracy.item())
    valid = ~whole["y"].isnan()
    expected = (predictions["y"][valid, 0] - whole["y"][valid]).abs().mean()
    assert found["y"]["mae"] == pytest.approx(expected.item(), rel=1e-6)
    assert [m.training for m in model.modules()] == [
        not name.startswith("trunk") for name, _ in model.named_modules()
    ]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_task_without_labels_has_no_metrics(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    found = evaluate(trainer.model, DataLoader(samples(labelled=False), batch_size=5))  # type: ignore[arg-type]
    assert found == {"cls": {}, "y": {}}


def test_the_peak_of_a_step_is_measured_with_optimizer_state(tmp_path: Path) -> None:
    trainer = make(tmp_path, ema_decay=0.5)
    trainer.engine.optimizer = torch.optim.Adam(trainer.model.parameters())
    trainer.engine.lr_scheduler = None
    outcome = trainer.fit()
    assert outcome.peak is not None
    parameters = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    # themselves, their average, their gradients, and the two moments of Adam
    assert outcome.peak.peak_bytes > 5 * parameters
    assert outcome.peak.method == "live tensor bytes"


def test_what_is_logged_holds_no_graph_g5(tmp_path: Path) -> None:
    trainer = make(tmp_path, total_steps=20)
    trainer.fit()
    for _, line in trainer.loggers[0].lines:  # type: ignore[attr-defined]
        assert all(type(value) is float or type(value) is int for value in line.values())


# --- what goes on after a state was loaded ----------------------------------------------------------------


def dropping(folder: Path, total_steps: int) -> Trainer:
    """A training whose trunk draws, and whose loss scale doubles after every third step."""
    folder.mkdir(exist_ok=True)
    trainer = make(folder, total_steps=total_steps)
    trainer.model.trunk.append(nn.Dropout(0.5))  # type: ignore[operator, union-attr]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    trainer.engine = Engine(trainer.model, trainer.engine.optimizer, scaler=scaler)
    return trainer


def resumed(folder: Path, state: dict[str, Any], seed: int) -> Trainer:
    trainer = dropping(folder, total_steps=8)
    torch.manual_seed(seed)
    trainer.load_state_dict(state)
    return trainer


def test_random_numbers_and_the_loss_scale_go_on_where_they_were(tmp_path: Path) -> None:
    first = dropping(tmp_path / "first", total_steps=5)
    first.fit()
    state, random_state = load_checkpoint(tmp_path / "first" / "last.pt"), torch.get_rng_state()
    assert first.engine.scaler.get_scale() == 16.0

    one = resumed(tmp_path / "one", state, seed=1)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert one.engine.scaler.state_dict() == first.engine.scaler.state_dict()
    one.fit()
    assert one.engine.scaler.get_scale() == 32.0, "after the sixth step"

    other = resumed(tmp_path / "other", state, seed=2)
    other.fit()
    for name, value in one.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value), "the same masks, whatever was drawn before"


# --- steps with values that aren't finite -----------------------------------------------------------------


def with_a_bad_batch(folder: Path, batch: int, **engine: Any) -> Trainer:
    """A trainer of which one batch of the first epoch has an infinite input; data in a fixed order."""
    trainer = make(folder, total_steps=6)
    data = samples()
    for sample in data[batch * 6 : batch * 6 + 6]:
        sample["x"] = torch.full((4,), float("inf"))
    sampler = MicroBatchSampler(SAMPLES, 6, shuffle=False)
    trainer.sampler, trainer.loader = sampler, DataLoader(data, batch_sampler=sampler)  # type: ignore[arg-type]
    trainer.engine = Engine(
        trainer.model, trainer.engine.optimizer, lr_scheduler=trainer.engine.lr_scheduler, **engine
    )
    return trainer


def test_a_step_that_is_not_finite_ends_with_the_state_before_it_saved(tmp_path: Path) -> None:
    trainer = with_a_bad_batch(tmp_path, batch=2)
    with pytest.raises(NonfiniteError, match="step 3: the loss of task 'cls' is nan.*inputs in the batch"):
        trainer.fit()
    assert trainer.steps == 2
    state = load_checkpoint(tmp_path / "last.pt")
    assert state["progress"]["steps"] == 2
    assert state["progress"]["samples_in_epoch"] == 2 * 6, "the batch is still to be trained on"
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(state["model"][name], value)
        assert value.isfinite().all()


def test_skipped_steps_are_counted_and_logged_and_not_trained_n7(tmp_path: Path) -> None:
    trainer = with_a_bad_batch(tmp_path, batch=2, on_nonfinite="skip")
    outcome = trainer.fit()
    assert outcome.steps == 6
    # each epoch has 4 batches, of which one is bad
    assert trainer.engine.skipped_steps.total == 2
    assert trainer.engine.lr_scheduler is not None
    assert trainer.engine.lr_scheduler.last_epoch == 6
    (notes,) = trainer.loggers
    assert isinstance(notes, Notes)
    skipped = {step: line.get("skipped_steps") for step, line in notes.lines if "lr" in line}
    assert skipped == {1: None, 2: None, 3: 1.0, 4: 1.0, 5: 1.0, 6: 2.0}
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_an_epoch_of_skipped_steps_is_no_epoch_without_labels(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.engine = Engine(
        trainer.model, trainer.engine.optimizer, on_nonfinite="skip", max_skipped=6, on_gradients=spoil
    )
    with pytest.raises(NonfiniteError, match=r"This is the 6\. skipped step in a row"):
        trainer.fit()


def spoil(model: MultiTaskModel) -> None:
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad.fill_(float("nan"))
