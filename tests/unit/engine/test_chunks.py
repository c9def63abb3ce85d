"""Chunks: a head and its loss take each micro-batch in several pieces."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    Classification,
    ConfigError,
    Engine,
    InplaceError,
    LabelCounts,
    MultiTaskModel,
    Neck,
    NonfiniteError,
    Regression,
    Task,
    TaskError,
    register_split,
    split_batch,
)
from mtaccum.engine import StepResult, checks, levers
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.memory import measure_peak

NAN, INF = float("nan"), float("inf")


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sizes_seen(module: nn.Module) -> list[int]:
    """How many samples each forward of a module gets."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _m, given: seen.append(len(given[0])))
    return seen


def assert_close_results(one: StepResult, other: StepResult) -> None:
    """Up to rounding; the counts exactly."""
    for mine, theirs in ((one.losses, other.losses), (one.loss_terms, other.loss_terms)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.item() == pytest.approx(theirs[name].item(), rel=1e-12)
            assert value.dtype == theirs[name].dtype
    assert (one.counts, one.idle, one.micro_batches) == (other.counts, other.idle, other.micro_batches)


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [2, 3, 4, 64])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("missing", [0.0, 0.5])
def test_each_label_weighs_the_same_however_unevenly_they_are_missing_l6(
    missing: float, micro_batches: int, chunks: int
) -> None:
    # one task has class weights, the others have NaN; later samples lack more labels
    model, batch = plain_model(), plain_batch(23, missing=missing)
    whole = joint_reference(model, [batch])
    engine = Engine(model, chunks=dict.fromkeys(model.tasks, chunks))
    result = engine.accumulate(split_batch(batch, micro_batches))
    assert_close_gradients(model, whole, 1e-12)
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(whole.losses[name].item(), rel=1e-12)


def test_losses_terms_and_counts_are_those_without_chunks() -> None:
    class Terms(Task):
        def loss(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
            return {"square": prediction.square().mean(), "sum": prediction.sum(1).mean()}

    torch.manual_seed(0)
    tasks = {
        "a": Terms(nn.Linear(4, 2), None),
        "b": Squared(nn.Linear(4, 2), "y"),
        "c": Squared(nn.Identity()),
    }
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x").double()
    window = split_batch({"x": torch.rand(7, 3, dtype=torch.float64)}, 3)
    whole = Engine(model).accumulate(window)
    model.zero_grad()
    result = Engine(model, chunks={"a": 2, "b": 2, "c": 3}).accumulate(window)
    assert_close_results(result, whole)
    assert set(result.loss_terms) == {"a/square", "a/sum"}
    assert result.idle == {"b": "no labels"}
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


@pytest.mark.parametrize(
    "modes",
    [
        {"seg": "frozen"},
        {"seg": "detached"},
        {"seg": "off"},
        {"seg": "detached", "bare": "detached", "noisy": "frozen"},
        {"left": "frozen", "right": "detached"},
    ],
    ids=str,
)
def test_modes_are_each_tasks_own(modes: dict[str, str]) -> None:
    model, window = awkward_model(), split_batch(awkward_batch(7), 2)
    for name, mode in modes.items():
        model.task(name).mode = mode
    seed_everything(2)
    reference = joint_reference(model, window)
    seed_everything(2)
    engine = Engine(model, chunks={"seg": 2, "left": 3, "right": 2, "bare": 2}, recompute=["*"])
    engine.accumulate(window)
    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)


def test_modes_may_change_between_steps() -> None:
    model, window = plain_model(), [plain_batch(6)]
    engine = Engine(model, chunks={"cls": 2, "value": 3})
    for mode in ("off", "frozen", "detached", "train"):
        model.task("cls").mode = mode
        model.zero_grad()
        engine.accumulate(window)
        assert_close_gradients(model, joint_reference(model, window), 1e-12)


def test_training_in_chunks_is_training_without() -> None:
    models = []
    for chunks in (None, {}, {"cls": 1}, {"cls": 2, "value": 5}):
        model = plain_model()
        engine = Engine(model, sgd(model), chunks=chunks, max_grad_norm=0.5)
        for seed in range(3):
            engine.step(split_batch(plain_batch(9, seed, missing=0.4), 2))
        models.append(model)
    for other in models[1:]:
        for one, two in zip(models[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


# --- which chunks run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "chunks", "expected"),
    [
        (5, 2, [3, 2]),
        (5, 4, [2, 1, 1, 1]),
        (3, 4, [1, 1, 1]),
        (1, 4, [1]),
        (6, 3, [2, 2, 2]),
        (4, 1, [4]),
    ],
)
def test_chunks_differ_by_at_most_one_sample_and_are_at_most_as_many(
    samples: int, chunks: int, expected: list[int]
) -> None:
    model = plain_model()
    seen, trunk = sizes_seen(model.task("cls").head), sizes_seen(model.trunk)
    Engine(model, chunks={"cls": chunks}).accumulate([plain_batch(samples)])
    assert seen == expected
    assert trunk == [samples]


def test_a_chunk_without_a_label_is_not_run() -> None:
    model, batch = plain_model(), plain_batch(7)
    batch["cls"][:4] = -100  # of 3, 2 and 2 samples the first has none, the second one label
    batch["value"][3:] = NAN
    heads = {name: sizes_seen(model.task(name).head) for name in ("cls", "value")}
    result = Engine(model, chunks={"cls": 3, "value": 3}).accumulate([batch])
    assert heads == {"cls": [2, 2], "value": [3]}
    assert result.counts["value"] == 6
    assert_close_gradients(model, joint_reference(model, [batch]), 1e-12)


def test_a_chunk_whose_labels_weigh_nothing_is_not_run() -> None:
    model = MultiTaskModel(
        nn.Linear(3, 4),
        {"cls": Classification(num_classes=2, head=nn.Linear(4, 2), class_weights=[0.0, 2.0])},
        inputs="x",
    ).double()
    batch = {"x": torch.rand(4, 3, dtype=torch.float64), "cls": torch.tensor([0, 0, 0, 1])}
    seen = sizes_seen(model.task("cls").head)
    Engine(model, chunks={"cls": 2}).accumulate([batch])
    assert seen == [2]
    assert_close_gradients(model, joint_reference(model, [batch]), 1e-12)


def test_an_idle_micro_batch_is_not_run_and_an_idle_task_gets_no_gradient() -> None:
    model, window = plain_model(), [plain_batch(4), plain_batch(5, seed=2), plain_batch(3, seed=3)]
    window[1]["cls"] = None
    del window[2]["cls"]
    for batch in window:
        batch["value"][:] = NAN
    seen = sizes_seen(model.task("cls").head)
    engine = Engine(model, chunks={"cls": 2, "value": 2})
    result = engine.accumulate(window)
    assert seen == [2, 2]
    assert result.idle == {"value": "no labels"}
    assert all(parameter.grad is None for parameter in model.task("value").parameters())
    assert_close_gradients(model, joint_reference(model, window), 1e-12)

    model.zero_grad()
    for batch in window:
        batch["cls"], batch["other"] = None, None
    assert engine.accumulate(window).losses == {}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("empty", [0, 1])
def test_a_micro_batch_without_samples_is_idle(empty: int) -> None:
    model, window = plain_model(), [plain_batch(4), plain_batch(5)]
    window[empty] = {key: value[:0] for key, value in window[empty].items()}
    Engine(model, chunks=dict.fromkeys(model.tasks, 3)).accumulate(window)
    assert_close_gradients(model, joint_reference(model, [window[1 - empty]]), 1e-12)


# --- what a head is given ---------------------------------------------------------------------------------


class Level(NamedTuple):
    map: Tensor
    stride: int


@dataclass
class Levels:
    maps: list[Level]
    strides: tuple[int, int, int]
    mean: Tensor
    scale: Tensor


class Pyramid(nn.Module):
    """Three levels, in as many ways as there are: 3 samples are not to be mistaken for these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        maps = [layer(x).tanh() for layer in self.layers]
        named = [Level(tensor, 2**i) for i, tensor in enumerate(maps)]
        return {
            "list": maps,
            "tuple": (maps[0], None, maps[2].exp()),
            "strides": [4, 8, 16],
            "own": Levels(named, (1, 2, 4), maps[1].mean(1), maps[0].sum()),
            "none": None,
        }


class OnLevels(nn.Module):
    """Uses every level of every container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, f: dict[str, Any]) -> Tensor:
        assert len(f["list"]) == len(f["tuple"]) == len(f["strides"]) == len(f["own"].maps) == 3
        assert f["strides"] == [4, 8, 16]
        total = sum(level * stride for level, stride in zip(f["list"], f["strides"], strict=True))
        total = total + f["tuple"][0] * f["tuple"][2] + f["own"].maps[1].map * f["own"].maps[1].stride
        return self.layer(total * f["own"].mean[:, None] + f["own"].scale)


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_features_are_split_tensor_by_tensor_whatever_holds_them(samples: int) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(
        Pyramid(), {"a": Squared(OnLevels()), "b": Squared(OnLevels(), weight=0.3)}, inputs="x"
    ).double()
    window = [{"x": torch.rand(samples, 3, dtype=torch.float64)}]
    Engine(model, chunks={"a": 3}).accumulate(window)
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


class WithBatch(Task):
    """A head that reads the batch, and a loss on targets that are a list of one dict per sample."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(nn.Linear(4, 2), "targets", weight)

    def forward(self, features: Tensor, batch: Any) -> Tensor:
        assert len(batch["scale"]) == len(features)
        return self.head(features) * batch["scale"]

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        assert len(batch["targets"]) == len(prediction)
        assert batch["note"] == "three"
        boxes = [
            (p - target["box"]).square().mean()
            for p, target in zip(prediction, batch["targets"], strict=True)
        ]
        return torch.stack(boxes).mean()


def test_head_and_loss_get_the_batch_of_their_chunk_with_targets_in_lists() -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 4), {"a": WithBatch(), "b": WithBatch(0.5)}, inputs="x").double()
    window = [
        {
            "x": torch.rand(n, 3, dtype=torch.float64),
            "scale": torch.rand(n, 1, dtype=torch.float64),
            "targets": [{"box": torch.rand(2, dtype=torch.float64)} for _ in range(n)],
            "note": "three",
        }
        for n in (5, 3)
    ]
    Engine(model, chunks={"a": 3, "b": 2}).accumulate(window)
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


def test_values_that_are_masked_do_not_count() -> None:
    torch.manual_seed(0)
    task = Regression(2, head=nn.Linear(4, 2), target="y", mask="mask", criterion="mse")
    model = MultiTaskModel(nn.Linear(3, 4), {"a": task}, inputs="x").double()
    batch = {
        "x": torch.rand(6, 3, dtype=torch.float64),
        "y": torch.rand(6, 2, dtype=torch.float64),
        "mask": torch.tensor([[1, 0], [0, 0], [0, 0], [0, 0], [1, 1], [0, 1]], dtype=torch.bool),
    }
    batch["y"][4, 0] = NAN
    seen = sizes_seen(task.head)
    result = Engine(model, chunks={"a": 3}).accumulate([batch])
    assert (seen, result.counts) == ([2, 2], {"a": 3})
    assert_close_gradients(model, joint_reference(model, [batch]), 1e-12)


class Fields(nn.Module):
    """Several inputs by name, of which one is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: Tensor, power: int) -> Tensor:
        return self.layer(x) * scale**power


def test_independent_models_with_inputs_of_several_fields() -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(
        None, {"a": Squared(Fields()), "b": Squared(Fields(), weight=0.5)}, inputs=["x", "scale", "power"]
    ).double()
    window = [
        {"x": torch.rand(n, 3).double(), "scale": torch.rand(n, 1).double(), "power": 2} for n in (2, 5)
    ]
    Engine(model, chunks={"a": 2, "b": 4}).accumulate(window)
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


class OnRagged(nn.Module):
    """A list of images of any size, one per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.layer(torch.stack([image.mean().reshape(1) for image in images]))


@pytest.mark.parametrize("inputs", ["images", lambda batch: [image * 2 for image in batch["images"]]])
def test_inputs_in_a_list_of_one_entry_per_sample_are_split_as_the_batch_is(inputs: Any) -> None:
    torch.manual_seed(0)
    tasks = {"a": Squared(OnRagged()), "b": Squared(OnRagged())}
    model = MultiTaskModel(None, tasks, inputs=inputs).double()
    for samples in (3, 4):  # of 3 by n pixels
        images = [torch.rand(3, n + 1, dtype=torch.float64) for n in range(samples)]
        window = [{"images": images}]
        model.zero_grad()
        Engine(model, chunks={"a": 2}).accumulate(window)
        assert_close_gradients(model, joint_reference(model, window), 1e-12)


def test_a_batch_of_a_type_of_ones_own_is_split_by_its_own_rule() -> None:
    class Rows:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __len__(self) -> int:
            return len(self.x)

    register_split(Rows, lambda batch, sizes: [Rows(rows) for rows in batch.x.split(sizes)])
    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Linear(4, 2)), "b": Squared(nn.Linear(4, 2))}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs=lambda batch: batch.x).double()
    window = [Rows(torch.rand(5, 3, dtype=torch.float64))]
    Engine(model, chunks={"a": 2}).accumulate(window)
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


# --- running statistics -----------------------------------------------------------------------------------


class Shifted(nn.Module):
    """InstanceNorm with running statistics on what has mean 1 in each channel: (n, 4) to (n, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True, momentum=0.1)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.detach().reshape(-1, 2, 2)
        shifted = shifted - shifted.mean(2, keepdim=True) + 1
        return self.layer(x) + self.norm(shifted).mean(2)


@pytest.mark.parametrize(
    ("labelled", "passes"),
    [(["11111"], 3), (["11000"], 1), (["11000", "00011"], 3), (["00000", "10101", "11"], 5), (["11100"], 2)],
)
def test_the_chunks_of_a_window_move_running_statistics_as_far_as_one_pass_s2(
    labelled: list[str], passes: int
) -> None:
    # a running mean of 0 that sees a mean of 1 with momentum 0.1 is 0.1 afterwards
    model = MultiTaskModel(
        nn.Linear(3, 4),
        {"a": Regression(2, head=Shifted(), target="y"), "b": Squared(nn.Linear(4, 1))},
        inputs="x",
    ).double()
    window = [
        {
            "x": torch.rand(len(text), 3, dtype=torch.float64),
            "y": torch.tensor([[0.5 if letter == "1" else NAN] * 2 for letter in text], dtype=torch.float64),
        }
        for text in labelled
    ]
    norm = model.task("a").head.norm
    seen = sizes_seen(norm)
    Engine(model, chunks={"a": 3}).accumulate(window)
    assert len(seen) == passes
    assert norm.momentum == 0.1
    expected = torch.full((2,), 0.1, dtype=torch.float64)
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-13, atol=0)


# --- backwards and memory ---------------------------------------------------------------------------------


def test_each_chunk_has_one_backward_of_its_scaled_loss() -> None:
    model, batch = plain_model(), plain_batch(7)
    batch["value"][:3], batch["value"][4, 1] = NAN, NAN
    seen: list[float] = []

    def backward(loss: Tensor) -> None:
        assert loss.dim() == 0
        seen.append(loss.item())
        loss.backward()

    engine = Engine(model, chunks={"value": 3}, backward=backward)
    counts = engine.count_labels([batch])
    result = engine.accumulate([batch])
    assert counts.chunk_counts["value"][0][0] == 0
    assert len(seen) == 1 + 2 + 1
    assert sum(seen[1:-1]) == pytest.approx(0.3 * result.losses["value"].item(), rel=1e-12)
    features = model.trunk(batch["x"])[3:5]
    target = batch["value"][3:5]
    difference = (model.task("value").head(features) - target)[~target.isnan()]
    expected = 0.3 * difference.square().sum().item() / result.counts["value"]
    assert seen[1] == pytest.approx(expected, rel=1e-12)


def peak(model: MultiTaskModel, batch: Any, **settings: Any) -> int:
    """Activation bytes of a window, the gradients being there already."""
    engine = Engine(model, **settings)

    def step() -> None:
        model.zero_grad()
        engine.accumulate([batch])

    measure_peak(step, existing=[model, *batch.values()])
    model.zero_grad()
    return measure_peak(step, existing=[model, *batch.values()]).activation_bytes


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_the_activations_of_a_head_fall_by_the_number_of_its_chunks(chunks: int) -> None:
    torch.manual_seed(0)
    large = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
    model = MultiTaskModel(nn.Linear(4, 4), {"a": Squared(large), "b": Squared(nn.Linear(4, 1))}, inputs="x")
    batch = {"x": torch.rand(4096, 4)}
    gradients = sum(parameter.numel() for parameter in model.parameters()) * 4
    small = 4 * batch["x"].numel() * 4  # features, their gradients
    whole = peak(model, batch) - gradients
    chunked = peak(model, batch, chunks={"a": chunks}) - gradients
    assert chunked <= whole / chunks + small + 2 * gradients


# --- when something goes wrong ----------------------------------------------------------------------------


class FailsAt(nn.Module):
    """A head that raises in one of its passes while ``broken`` is set."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.at, self.passes, self.broken = at, 0, True

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y = self.norm(F.dropout(self.layer(x))[..., None].expand(-1, -1, 3) * torch.arange(3)).mean(2)
        if self.broken and self.passes == self.at:
            raise RuntimeError("broken")
        return y


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_head_that_fails_in_a_chunk_leaves_everything_as_it_was_g7(at: int) -> None:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        tasks = {
            "first": Squared(nn.Linear(4, 2)),
            "bad": Squared(FailsAt(at)),
            "last": Squared(nn.Linear(4, 2)),
        }
        trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        return MultiTaskModel(trunk, tasks, inputs="x")

    model, clean = build(), build()
    window = split_batch({"x": torch.rand(8, 3)}, 2)
    engine = Engine(model, sgd(model), chunks={"bad": 2, "first": 3})
    before, random = copy.deepcopy(model.state_dict()), RandomState()

    with pytest.raises(TaskError, match="task 'bad'.*broken"):
        engine.step(window)

    assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal_states(model.state_dict(), before)
    assert RandomState() == random
    assert model.task("bad").head.norm.momentum == 0.1
    model.task("bad").head.broken = clean.task("bad").head.broken = False
    for other, its_engine in (
        (model, engine),
        (clean, Engine(clean, sgd(clean), chunks={"bad": 2, "first": 3})),
    ):
        seed_everything(1)
        its_engine.step(window)
        assert other.task("bad").head.passes >= 4
    assert_equal_states(model.state_dict(), clean.state_dict())


def test_a_failed_chunk_leaves_the_callers_gradients_bitwise_g7() -> None:
    model = plain_model()
    model.task("value").head = Failing(model.task("value").head, RuntimeError("broken"))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    own = gradients_of(model)
    with pytest.raises(TaskError, match="task 'value'.*broken"):
        Engine(model, chunks={"value": 2, "cls": 2}).accumulate([plain_batch(4)], restore_on_error=True)
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, own[name])


@pytest.mark.parametrize("trunk", [nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Identity()])
def test_a_head_that_writes_into_its_chunk_of_the_features_is_an_error(trunk: nn.Module) -> None:
    width = 4 if len(list(trunk.parameters())) else 3
    heads = {"a": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, 2)), "b": nn.Linear(width, 2)}
    model = MultiTaskModel(trunk, {n: Squared(head) for n, head in heads.items()}, inputs="x")
    with pytest.raises(InplaceError, match="^'a' writes in place into the features"):
        Engine(model, chunks={"a": 2}).accumulate([{"x": torch.rand(5, 3)}])


class Ratio(Task):
    """A loss that divides by an entry of the batch."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return (prediction.square().mean(1) / batch[self.target]).mean()


@pytest.mark.parametrize("bad", ["a", "b"])
@pytest.mark.parametrize("sample", [0, 4])
def test_a_loss_that_is_not_finite_is_named_by_its_task(sample: int, bad: str) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 4), {n: Ratio(nn.Linear(4, 2), n) for n in "ab"}, inputs="x")
    window = [{"x": torch.rand(5, 3), "a": torch.ones(5), "b": torch.ones(5)} for _ in range(2)]
    window[1][bad][sample] = 0
    before = copy.deepcopy(model.state_dict())
    engine = Engine(model, sgd(model), chunks={"a": 3, "b": 2})
    message = rf"the loss of task '{bad}' is inf in micro-batch 1 of 2: the prediction is finite"
    with pytest.raises(NonfiniteError, match=message):
        engine.step(window)
    assert_equal_states(model.state_dict(), before)


def test_a_search_runs_in_the_same_chunks_so_that_it_draws_the_same_and_takes_no_more() -> None:
    class Rare(nn.Module):
        """Two draws in each pass, of which one is infinite by chance."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            drawn.append(torch.rand(2))
            return torch.where(drawn[-1][1] == limit, INF, 1.0) * self.layer(x)

    drawn: list[Tensor] = []
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(3, 4), {"a": Squared(Rare()), "b": Squared(nn.Linear(4, 1))}, inputs="x")
    torch.manual_seed(3)
    limit = torch.rand(6)[5]  # in the third chunk
    torch.manual_seed(3)
    sizes = sizes_seen(model.task("a").head)
    with pytest.raises(NonfiniteError, match="the loss of task 'a' is (inf|nan) in micro-batch 0 of 1"):
        Engine(model, sgd(model), chunks={"a": 3}).step(
            [{"x": torch.rand(6, 3, generator=torch.Generator())}]
        )
    assert sizes == [2] * 6
    assert all(torch.equal(one, other) for one, other in zip(drawn[:3], drawn[3:], strict=True))


def test_a_gradient_that_is_not_finite_is_named_by_its_task() -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return (y - y.detach()).abs().sqrt() + y

    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Linear(3, 4), {"a": Squared(nn.Linear(4, 1)), "b": Squared(Rooted())}, inputs="x"
    )
    with pytest.raises(NonfiniteError, match="the gradient of task 'b' is not finite in micro-batch 0 of 1"):
        Engine(model, sgd(model), chunks={"a": 2, "b": 2}).step([{"x": torch.rand(4, 3)}])


# --- what is refused --------------------------------------------------------------------------------------


def refuse(chunks: Any, *words: str, model: MultiTaskModel | None = None, **settings: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(plain_model() if model is None else model, chunks=chunks, **settings)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_task_is_refused_with_the_nearest_and_all_there_are() -> None:
    unknown = "task in head_groups or chunks: 'valu'"
    refuse({"valu": 2}, unknown, "Did you mean 'value'?", "Known: cls, other, value")
    refuse({"trunk": 2}, "'trunk'", "Known: cls, other, value")


@pytest.mark.parametrize("chunks", [2, "cls", ["cls"], [("cls", 2)], [], 0, False, ""], ids=repr)
def test_chunks_that_are_no_dict_are_refused(chunks: Any) -> None:
    refuse(chunks, "chunks must be a dict of numbers by task, such as {seg: 4}, got", repr(chunks))


@pytest.mark.parametrize("number", [0, -1, True, False, 1.5, 2.0, "2", None], ids=repr)
def test_a_number_of_chunks_that_is_none_is_refused(number: Any) -> None:
    refuse({"cls": number}, f"chunks.cls must be a whole number of at least 1, got {number!r}")


@pytest.mark.parametrize("schedule", ["summed", "sequential"])
def test_chunks_with_another_schedule_than_split_are_refused(schedule: str) -> None:
    refuse(
        {"cls": 2},
        "chunks belongs to schedule='split'",
        repr(schedule),
        "more micro-batches",
        schedule=schedule,
    )
    Engine(plain_model(), chunks={"cls": 1}, schedule=schedule)


def test_a_loss_that_is_no_mean_over_labels_is_refused() -> None:
    class Dice(Squared):
        additive = False

    model = MultiTaskModel(nn.Linear(3, 4), {"dice": Dice(nn.Linear(4, 2))}, inputs="x")
    refuse({"dice": 2}, "the loss of 'dice' is not a mean over labels", "Recompute segments", model=model)
    Engine(model, chunks={"dice": 1})


def normed(norm: nn.Module) -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Sequential(nn.Linear(4, 4), norm)), "b": Squared(nn.Linear(4, 2))}
    return MultiTaskModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tasks, inputs="x").double()


COUPLED = ("chunks: 'a' can't take its micro-batch in chunks, since a.1 normalises", "freeze", "GroupNorm")


@pytest.mark.parametrize("settings", [{}, {"batchnorm": "sync"}], ids=str)
def test_batch_normalisation_in_a_chunked_head_is_refused(settings: dict[str, str]) -> None:
    refuse({"a": 2}, *COUPLED, model=normed(nn.BatchNorm1d(4)), **settings)
    untracked = normed(nn.BatchNorm1d(4, track_running_stats=False))
    untracked.task("a").eval()
    refuse({"a": 2}, *COUPLED, model=untracked, **settings)


def test_an_engine_that_refuses_has_changed_nothing() -> None:
    model = normed(nn.BatchNorm1d(4))
    refuse({"a": 2}, model=model, batchnorm="sync")
    assert type(model.trunk[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("freeze", [True, False])
def test_batch_normalisation_by_running_statistics_may_be_chunked(freeze: bool) -> None:
    model, window = normed(nn.BatchNorm1d(4)), [{"x": torch.rand(5, 3, dtype=torch.float64)}]
    if freeze:
        model.eval()
        reference = joint_reference(model, window)
        model.train()
        engine = Engine(model, chunks={"a": 2}, batchnorm="freeze")
    else:
        model.task("a").eval()
        reference = joint_reference(model, window)
        engine = Engine(model, chunks={"a": 2})
    engine.accumulate(window)
    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)


def test_batch_normalisation_elsewhere_and_with_one_chunk_may_stay() -> None:
    model = normed(nn.BatchNorm1d(4))
    Engine(model, chunks={"a": 1, "b": 3}).accumulate([{"x": torch.rand(5, 3, dtype=torch.float64)}])


def test_batch_normalisation_is_refused_too_when_a_head_learns_to_normalise_later() -> None:
    model = normed(nn.BatchNorm1d(4))
    model.task("a").eval()
    engine = Engine(model, sgd(model), chunks={"a": 2})
    engine.step([{"x": torch.rand(5, 3, dtype=torch.float64)}])
    model.train()
    before = copy.deepcopy(model.state_dict())
    for run in (engine.step, engine.accumulate):
        with pytest.raises(ConfigError) as caught:
            run([{"x": torch.rand(5, 3, dtype=torch.float64)}])
        assert all(word in str(caught.value) for word in COUPLED)
    assert_equal_states(model.state_dict(), before)


@pytest.mark.parametrize(
    "extra", [lambda x: torch.zeros(2, 3), lambda x: x[:-1], lambda x: [x, (x, x.new_ones(1, 4))]]
)
def test_features_that_can_not_be_split_are_refused_with_node_and_shape(
    extra: Callable[[Tensor], Any],
) -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"x": self.layer(x), "extra": extra(x)}

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, features: dict[str, Any]) -> Tensor:
            return self.layer(features["x"])

    model = MultiTaskModel(Extra(), {"a": Squared(First()), "b": Squared(First())}, inputs="x")
    Engine(model).accumulate([{"x": torch.rand(5, 3)}])
    model.zero_grad()
    with pytest.raises(
        TaskError, match=r"chunks of task 'b': the features of 'trunk' hold a Tensor\("
    ) as caught:
        Engine(model, chunks={"b": 2}).accumulate([{"x": torch.rand(5, 3)}])
    assert "its first dimension must be 5" in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_features_that_a_chunked_head_does_not_read_need_no_samples() -> None:
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.queries = nn.Linear(3, 4), nn.Parameter(torch.rand(2, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.queries

    class Ask(nn.Module):
        def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
            return (features[0] @ features[1].T).tanh()

    torch.manual_seed(0)
    model = MultiTaskModel(
        Queries(),
        {"on_neck": Squared(nn.Linear(2, 1), on="neck"), "on_trunk": Squared(Ask())},
        necks={"neck": Neck(Ask())},
        inputs="x",
    ).double()
    window = [{"x": torch.rand(5, 3, dtype=torch.float64)}]
    Engine(model, chunks={"on_neck": 2}).accumulate(window)
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


def test_a_batch_that_can_not_be_split_is_refused_by_task_before_any_forward() -> None:
    model, batch = plain_model(), plain_batch(5)
    passes = sizes_seen(model.trunk)
    batch["anchors"] = torch.rand(7)
    with pytest.raises(TaskError, match=r"chunks of task 'cls': an entry Tensor\(7\) can't be split"):
        Engine(model, chunks={"cls": 2}).accumulate([batch])
    assert passes == []


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda batch: 1, r"count\(\) gives 1 for a micro-batch, but 2 for its chunks together"),
        (lambda batch: max(len(batch["x"]) - 1, 0), r"count\(\) gives 4 .* but 3 for its"),
        (lambda batch: 0.0 if len(batch["x"]) == 5 else 1e-9, r"count\(\) gives 0 .* but 2e-09 for its"),
        (lambda batch: 5.0 if len(batch["x"]) == 5 else -1, r"count\(\) gave -1.0; it must be finite"),
        (lambda batch: 5.0 if len(batch["x"]) == 5 else INF, r"count\(\) gave inf; it must be finite"),
    ],
)
def test_a_count_that_does_not_add_up_over_the_chunks_is_refused(
    count: Callable[[Any], float], message: str
) -> None:
    class Counted(Squared):
        def count(self, batch: Any) -> Any:
            return count(batch)

    model = MultiTaskModel(nn.Linear(3, 4), {"t": Counted(nn.Linear(4, 1))}, inputs="x")
    with pytest.raises(TaskError, match=re.compile("task 't': " + message)):
        Engine(model, chunks={"t": 2}).accumulate([{"x": torch.rand(5, 3)}])


def test_counts_that_add_up_to_rounding_are_fine() -> None:
    class Thirds(Squared):
        def count(self, batch: Any) -> Any:
            return torch.full((len(batch["x"]),), 1 / 3, dtype=torch.float32).sum()

    model = MultiTaskModel(nn.Linear(3, 4), {"t": Thirds(nn.Linear(4, 1))}, inputs="x")
    Engine(model, chunks={"t": 7}).accumulate([{"x": torch.rand(1000, 3)}])


# --- counts that are known beforehand ---------------------------------------------------------------------


def test_label_counts_hold_those_of_all_chunks() -> None:
    model = plain_model()
    window = [plain_batch(5), plain_batch(1, seed=2)]
    window[0]["value"][0:3] = NAN
    window[0]["value"][3, 0] = NAN
    engine = Engine(model, chunks={"value": 2, "cls": 1})
    labels = engine.count_labels(window)
    assert labels.chunk_counts == {"value": ((0.0, 3.0), (2.0,))}
    assert labels.counts["value"] == (3.0, 2.0)
    assert labels.head_passes("value") == 2
    assert labels.head_passes("cls") == 2
    assert labels.count("value", 0, 1) == 3.0
    counts = WindowCounts.agreed(labels, model, engine.ranks)
    assert counts.scale("value", 0, 1) == pytest.approx(0.3 * 3 / 5, rel=1e-15)


def test_a_step_with_counts_counts_nothing_again_and_does_the_same() -> None:
    counted: list[str] = []

    class Counted(Squared):
        def count(self, batch: Any) -> Any:
            counted.append("count")
            return len(batch["x"])

    outcomes = []
    for known in (False, True):
        torch.manual_seed(0)
        model = MultiTaskModel(nn.Linear(3, 4), {"t": Counted(nn.Linear(4, 1))}, inputs="x")
        window = [{"x": torch.linspace(0, 1, 15).reshape(5, 3)}]
        engine = Engine(model, sgd(model), chunks={"t": 2})
        counts = engine.count_labels(window) if known else None
        counted.clear()
        outcomes.append(engine.step(window, counts=counts).losses["t"])
        assert len(counted) == (0 if known else 3)
        gradient = Engine(model, chunks={"t": 2}).accumulate(window, counts=counts).losses["t"]
        assert len(counted) == (0 if known else 6)
        outcomes.append(gradient)
    assert torch.equal(outcomes[0], outcomes[2])
    assert torch.equal(outcomes[1], outcomes[3])


def test_counts_of_something_else_are_refused_with_what_they_are_of() -> None:
    model = plain_model()
    engine = Engine(model, sgd(model), chunks={"cls": 2})
    window = [plain_batch(4), plain_batch(5)]
    counts = engine.count_labels(window)
    before = copy.deepcopy(model.state_dict())

    def refused(window: list[Any], counts: Any, *words: str) -> None:
        for run in (engine.step, engine.accumulate):
            with pytest.raises(ConfigError) as caught:
                run(window, counts)
            assert all(word in str(caught.value) for word in words), str(caught.value)

    refused(window[:1], counts, "2 micro-batches", "of 1 micro-batches", "this engine's count_labels(window)")
    refused(window, {"cls": 3}, "counts must be LabelCounts, as Engine.count_labels gives, got dict")
    refused(window, LabelCounts.of(model.tasks_by_name(), window), "of which cls in chunks")
    other = Engine(model, chunks={"cls": 2, "value": 2}).count_labels(window)
    refused(window, other, "of which cls, value in chunks")
    model.task("other").mode = "off"
    refused(window, counts, "the tasks cls, other, value", "and the tasks cls, value", "switched on or off")
    assert_equal_states(model.state_dict(), before)
    for task in model.tasks_by_name().values():
        task.mode = "off"
    assert not engine.step(window, engine.count_labels(window)).stepped
    refused(window, counts, "the tasks cls, other, value")


def test_counts_of_a_chunked_task_that_is_off_hold_no_chunks() -> None:
    model = plain_model()
    model.task("cls").mode = "off"
    engine, window = Engine(model, chunks={"cls": 2}), [plain_batch(4)]
    counts = engine.count_labels(window)
    assert counts.chunk_counts == {}
    engine.accumulate(window, counts)


# --- saved tensors in the host's memory -------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["yes", 1, None, 0], ids=repr)
def test_offload_is_true_or_false(offload: Any) -> None:
    with pytest.raises(ConfigError, match=f"offload must be True or False, got {offload!r}"):
        Engine(plain_model(), offload=offload)


def test_offload_is_refused_where_activations_lie_in_the_hosts_memory_already() -> None:
    with pytest.raises(ConfigError, match=r"the model is on cpu\. Recompute segments instead: recompute="):
        Engine(plain_model(), offload=True)


def test_what_a_window_saves_is_offloaded_to_pinned_memory_until_its_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, back = [], []

    @contextmanager
    def in_place_of_the_card(pin_memory: bool) -> Iterator[None]:
        assert pin_memory

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.shape)
            return tensor.clone()

        def unpack(tensor: Tensor) -> Tensor:
            back.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    monkeypatch.setattr(levers, "save_on_cpu", in_place_of_the_card)
    model, window = plain_model(), split_batch(plain_batch(7), 2)
    engine = Engine(model)
    engine.accumulate(window)
    assert saved == []
    model.zero_grad()
    monkeypatch.setattr(checks, "_check_offload", lambda *_: None)
    engine = Engine(model, offload=True)
    engine.accumulate(window)
    assert len(saved) == len(back) > 10
    assert_close_gradients(model, joint_reference(model, window), 1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": "summed"},
        {"schedule": "sequential", "head_groups": [["depth", "cls"]]},
        {"chunks": {"seg": 2}, "recompute": ["fpn", "seg"]},
    ],
    ids=str,
)
def test_offloaded_gradients_and_buffers_are_those_without_and_take_less_of_the_device(
    settings: dict[str, Any],
) -> None:
    outcomes = []
    for offload in (False, True):
        model = awkward_model().cuda()
        engine = Engine(model, offload=offload, **settings)
        seed_everything(4)
        engine.accumulate([awkward_batch(5), awkward_batch(3)])
        outcomes.append((gradients_of(model), dict(model.named_buffers())))
    for name, gradient in outcomes[0][0].items():
        torch.testing.assert_close(outcomes[1][0][name], gradient, rtol=1e-12, atol=1e-14)
    for name, buffer in outcomes[0][1].items():
        torch.testing.assert_close(outcomes[1][1][name], buffer, rtol=1e-12, atol=1e-14)

    deep = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    model = MultiTaskModel(deep, {"a": Squared(nn.Linear(256, 1))}, inputs="x").cuda()
    batch, peaks = {"x": torch.rand(8192, 256, device="cuda")}, []
    for offload in (False, True):
        engine = Engine(model, offload=offload)
        engine.accumulate([batch])
        model.zero_grad()
        peaks.append(measure_peak(lambda e=engine: e.accumulate([batch]), device="cuda").activation_bytes)
        model.zero_grad()
    assert peaks[1] < 0.7 * peaks[0]
