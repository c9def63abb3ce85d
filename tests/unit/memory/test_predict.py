"""Predicted bytes against those of the real step: to the byte, but for what is named here."""

from __future__ import annotations

import copy
import gc
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import (
    ARCHITECTURES,
    Architecture,
    Made,
    Scene,
    distance,
    labelled,
    line,
    on,
    sequences,
    trunk,
    two_heads,
    vectors,
)
from helpers import SCHEDULE_NAMES, RandomState
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode
from ways import Way, way_of

from mtaccum import (
    BatchError,
    Classification,
    ConfigError,
    Engine,
    InexactWarning,
    MultiTaskModel,
    OptimizerError,
    Regression,
    Segmentation,
    StepOptions,
    TaskError,
    split_batch,
)
from mtaccum.errors import PredictionError
from mtaccum.memory import FakeTraining, LiveBytes, PeakReport, Prediction, measure_step
from mtaccum.memory.labels import state_tensors
from mtaccum.memory.predict import predict_evaluation
from mtaccum.model import evaluating
from mtaccum.structure import tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay"),
    pytest.mark.filterwarnings("ignore:.*nn.utils.weight_norm.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:no gradient reached"),
]

BuildOptimizer = Callable[[nn.Module], Optimizer]


@pytest.fixture(autouse=True, scope="module")
def _old_objects_set_aside() -> Iterator[None]:
    """So that collecting garbage takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """Nothing here may depend on when the collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters())


def sgd(model: nn.Module) -> Optimizer:
    """Of few operations, so that it is predicted soon."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def measured(
    model: MultiTaskModel,
    optimizer: Optimizer,
    batch: Any,
    way: Way,
    existing: Sequence[nn.Module] = (),
) -> PeakReport:
    """A real step in a way, of an optimizer that has its state."""
    engine = Engine(model, optimizer, options=way.options)
    return measure_step(engine, split_batch(batch, way.accumulate), existing=existing)[1]


def assert_same(prediction: Prediction, report: PeakReport) -> None:
    assert dict(prediction.by_kind) == dict(report.by_kind)
    assert prediction.peak_bytes == report.peak_bytes
    assert prediction.start_bytes == report.start_bytes
    assert prediction.stage == report.stage


def assert_predicted(
    build: Callable[[], MultiTaskModel],
    batch: Any,
    ways: Sequence[Way],
    optimizer: BuildOptimizer = sgd,
    compare: Callable[[Prediction, PeakReport], None] = assert_same,
    copies: int = 0,
    **options: Any,
) -> None:
    """Steps in several ways, predicted and for real.

    Args:
        options: of all these steps.
    """
    training = FakeTraining(
        build, batch, build_optimizer=optimizer, copies=copies, options=StepOptions(**options)
    )
    model = build()
    real = optimizer(model)
    Engine(model, real, **options).step([copy.deepcopy(batch)])
    existing = [copy.deepcopy(model) for _ in range(copies)]
    for way in ways:
        way = Way(way.options.changed(options), way.accumulate)
        prediction = training.predict(*way)
        gc.collect()
        compare(prediction, measured(model, real, batch, way, existing))


def assert_same_moments(build: Callable[[], MultiTaskModel], batch: Any, way: Way) -> None:
    """The same bytes after each operation of the forwards and backwards."""
    prediction = FakeTraining(build, batch).predict(*way, timeline=True)
    model = build()
    engine = Engine(model, adamw(model), options=way.options)
    window = split_batch(batch, way.accumulate)
    engine.step(window)
    gc.collect()
    _, report = measure_step(engine, window, timeline=True)
    predicted, real = (
        [moment for moment in moments if moment.stage and moment.stage != "optimizer step"]
        for moments in (prediction.timeline, report.timeline)
    )
    assert [moment.op for moment in predicted] == [moment.op for moment in real]
    assert predicted == real


# --- architectures ----------------------------------------------------------------------------------------

NOT_PREDICTED = {
    "a_recurrent_trunk": "recurrent layers .*: trunk\\.",
    "features_packed_by_length": "recurrent layers .*: trunk.rnn\\.",
    "other_normalisations": "after trunk.2 began",  # a BatchNorm that reads how many batches there were
    "features_of_a_tensor_type_of_its_own": "subclass Tagged",
}
DIFFERENT = {
    "layers_dropped_at_random": "the dice of Python fall anew in each step",
    "a_trunk_that_is_frozen_in_part": "PyTorch's fake BatchNorm makes a gradient that nobody asked for",
    "nothing_learns_at_all": "no optimizer",
    "inputs_that_want_a_gradient": "a real batch keeps its gradient from one step to the next",
}


def samples_of(architecture: Architecture) -> int:
    return 1 if architecture.sizes == (1, 1, 1) else 7


def way_for(name: str) -> Way:
    """Schedule, what is recomputed and K go round from one architecture to the next."""
    architecture, place = ARCHITECTURES[name], list(ARCHITECTURES).index(name)
    schedule, accumulate = SCHEDULE_NAMES[place % 3], (1, 3)[place // 3 % 2]
    recomputes = architecture.recomputes()
    recompute = recomputes[place % len(recomputes)]
    return way_of(schedule, min(samples_of(architecture), accumulate), recompute=recompute)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in {**NOT_PREDICTED, **DIFFERENT}])
def test_architectures_need_what_is_predicted(name: str) -> None:
    architecture = ARCHITECTURES[name]
    batch = architecture.batch(samples_of(architecture), 0)
    assert_predicted(architecture.model, batch, [way_for(name)])


@pytest.mark.parametrize("name", NOT_PREDICTED)
def test_architectures_that_cannot_be_predicted_say_why(name: str) -> None:
    architecture = ARCHITECTURES[name]
    with pytest.raises(PredictionError, match=NOT_PREDICTED[name]):
        FakeTraining(architecture.model, architecture.batch(4, 0))


def test_batchnorm_on_a_frozen_layer_is_predicted_with_one_gradient_too_many() -> None:
    architecture = ARCHITECTURES["a_trunk_that_is_frozen_in_part"]

    def compare(prediction: Prediction, report: PeakReport) -> None:
        gradient = 7 * 4 * 8  # samples, features, bytes
        assert report.peak_bytes <= prediction.peak_bytes <= report.peak_bytes + gradient

    ways = [way_of(schedule, k) for schedule in SCHEDULE_NAMES for k in (1, 3)]
    assert_predicted(architecture.model, architecture.batch(7, 0), ways, compare=compare)


def test_a_model_that_does_not_learn_has_no_state() -> None:
    architecture = ARCHITECTURES["nothing_learns_at_all"]
    mine = nn.Parameter(torch.zeros(1))
    training = FakeTraining(
        architecture.model, architecture.batch(4, 0), build_optimizer=lambda _: torch.optim.AdamW([mine])
    )
    assert training.predict().by_kind["optimizer state"] == 0


# --- optimizers, precision, and what else an engine is given -----------------------------------------------


def dense_model() -> MultiTaskModel:
    torch.manual_seed(0)

    def head(classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, classes, 1)
        )

    shared = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3),
        nn.GELU(),
    )
    tasks = {
        "seg": Segmentation(5, head=head(5), target="seg"),
        "depth": Regression(dense=True, head=head(1), target="depth", weight=0.5),
    }
    return MultiTaskModel(shared, tasks, inputs="image")


def dense_batch(samples: int = 6) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return {
        "image": torch.rand(samples, 3, 12, 12, generator=numbers),
        "seg": torch.randint(5, (samples, 10, 10), generator=numbers),
        "depth": torch.rand(samples, 1, 10, 10, generator=numbers),
        "cls": torch.randint(3, (samples,), generator=numbers),
    }


TWO_WAYS = [way_of("split"), way_of("summed", 4, recompute=("trunk",))]
MANY_WAYS = [
    way_of(schedule, k, recompute=recompute)
    for schedule in SCHEDULE_NAMES
    for k in (1, 4)
    for recompute in ((), ("trunk", "seg.0"))
]

OPTIMIZERS: dict[str, BuildOptimizer] = {
    "AdamW": adamw,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD with momentum": sgd,
    "SGD after Nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam with amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "AdamW on lists": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "SGD on lists": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "AdamW in one kernel": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "AdamW by groups": lambda model: torch.optim.AdamW(
        [{"params": model.trunk.parameters(), "lr": 1e-4}, {"params": model.tasks.parameters()}]
    ),
    "AdamW with a tensor's rate": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_need_what_is_predicted(name: str) -> None:
    assert_predicted(dense_model, dense_batch(), TWO_WAYS, OPTIMIZERS[name])


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.ASGD])
def test_an_optimizer_that_reads_values_is_named(optimizer: type[Optimizer]) -> None:
    with pytest.raises(PredictionError, match=rf"in the step of {optimizer.__name__}\)"):
        FakeTraining(dense_model, dense_batch(), build_optimizer=lambda m: optimizer(m.parameters()))


def test_a_dense_model_needs_what_is_predicted_whatever_the_way() -> None:
    assert_predicted(dense_model, dense_batch(), MANY_WAYS)


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"batchnorm": "freeze"}])
def test_engines_need_what_is_predicted(options: dict[str, Any]) -> None:
    assert_predicted(dense_model, dense_batch(), TWO_WAYS, **options)


def test_averaged_weights_are_predicted() -> None:
    assert_predicted(dense_model, dense_batch(), TWO_WAYS, copies=1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_predicted_but_for_the_statistics_of_norms(precision: str) -> None:
    """PyTorch's fake BatchNorm keeps mean and deviation of each channel in half precision."""

    def compare(prediction: Prediction, report: PeakReport) -> None:
        channels = 3 * 8
        assert 0 <= report.peak_bytes - prediction.peak_bytes <= channels * 4 + 16
        assert prediction.stage == report.stage
        assert 0.999 <= prediction.peak_bytes / report.peak_bytes <= 1.0

    assert_predicted(dense_model, dense_batch(), MANY_WAYS[::2], adamw, compare, precision=precision)
    half, single = (
        FakeTraining(dense_model, dense_batch(), options=StepOptions(precision=p)).predict()
        for p in (precision, "fp32")
    )
    assert half.by_kind["activations"] < 0.8 * single.by_kind["activations"], "casts are predicted"


# --- models ------------------------------------------------------------------------------------------------


def three_heads() -> MultiTaskModel:
    """A class-weighted dense task, a dense one, and a class-weighted one of each image."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 5, 1))
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return MultiTaskModel(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        {
            "seg": Segmentation(5, head=wide, target="seg", class_weights=[1.0, 2.0, 3.0, 0.5, 0.2]),
            "depth": Regression(dense=True, head=nn.Conv2d(8, 1, 1), target="depth"),
            "cls": Classification(3, head=pooled, class_weights=[1.0, 2.0, 3.0]),
        },
        inputs="image",
    )


def test_counts_that_need_a_models_tensors_are_counted_for_real() -> None:
    assert_predicted(three_heads, dense_batch(), TWO_WAYS)


GROUPS, CHUNKS = (("depth", "cls"),), {"seg": 2, "cls": 3}


@pytest.mark.parametrize(
    "way",
    [
        way_of("split", head_groups=GROUPS),
        way_of("split", 3, head_groups=GROUPS),
        way_of("sequential", 3, head_groups=(("seg", "cls"),)),
        way_of("split", chunks=CHUNKS),
        way_of("split", 3, chunks=CHUNKS),
        way_of("split", 2, recompute=("trunk", "seg[0:2]"), head_groups=GROUPS, chunks={"seg": 4}),
    ],
    ids=str,
)
def test_head_groups_and_chunks_need_what_is_predicted(way: Way) -> None:
    assert_predicted(three_heads, dense_batch(8), [way])


def test_micro_batches_of_different_sizes_need_what_is_predicted() -> None:
    batch = dense_batch(7)
    assert_predicted(three_heads, batch, [way_of("split", k) for k in (2, 3, 4, 5, 7)])


def with_labels(**counts: int | None) -> dict[str, Any]:
    """A batch of 8 of which only the first samples have a label of some tasks; None: the entry is None."""
    batch: dict[str, Any] = dense_batch(8)
    for name, count in counts.items():
        if count is None:
            batch[name] = None
        else:
            batch[name][count:] = torch.nan if name == "depth" else 255 if name == "seg" else -100
    return batch


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("labels", [{"seg": 0}, {"cls": 3, "depth": 5}, {"seg": None, "cls": 2}])
def test_tasks_without_labels_are_predicted_not_to_run(schedule: str, labels: dict[str, int | None]) -> None:
    training = FakeTraining(three_heads, with_labels(**labels))
    model = three_heads()
    optimizer = adamw(model)
    Engine(model, optimizer).step([dense_batch(8)])  # the state of a task that had labels once
    for micro_batches in (1, 2, 4, 8):
        way = way_of(schedule, micro_batches)
        assert_same(training.predict(*way), measured(model, optimizer, with_labels(**labels), way))


def test_the_last_micro_batch_of_a_kind_finds_the_gradients_of_all() -> None:
    """Large ones of ``a``, then those of ``b``, whose gradients are there when a large one comes again."""

    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        heads = {"a": nn.Linear(4, 400), "b": nn.Linear(4, 50)}
        return MultiTaskModel(
            nn.Linear(3, 4),
            {name: Regression(head.out_features, head=head, target=name) for name, head in heads.items()},
            inputs="x",
        )

    batch = {"x": torch.rand(48, 3), "a": torch.rand(48, 400), "b": torch.full((48, 50), torch.nan)}
    batch["a"][24:40] = torch.nan
    batch["b"][24:40] = 1.0
    assert_predicted(build, batch, [way_of("split", 6), way_of("sequential", 6)])


def test_a_hundred_micro_batches_are_predicted_by_a_few() -> None:
    ran: list[int] = []

    def build() -> MultiTaskModel:
        def run(self: Any, x: Tensor) -> Tensor:
            ran.append(len(x))
            return self.layer(x)

        torch.manual_seed(0)
        return two_heads(Made(run, layer=line(3, 4)), line(), line())

    batch = {key: value.float() for key, value in vectors(150, 0).items()}
    training = FakeTraining(build, batch)
    ran.clear()
    prediction = training.predict(accumulate=100)
    assert ran == [2, 2, 2, 1, 1, 1]
    model = build()
    optimizer = adamw(model)
    Engine(model, optimizer).step([batch])
    assert_same(prediction, measured(model, optimizer, batch, way_of("split", 100)))


class Hides(nn.Module):
    """Tensors that are neither parameters nor buffers, one of which is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.table = torch.rand(50, 4)
        self.list = [self.table[:2], {"scale": torch.rand(4)}, (torch.rand(4), "name")]

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.layer(x) * self.list[1]["scale"] + self.table.sum(0) + self.list[2][0] + self.list[0].sum(0)
        )


class ReadsValues(nn.Module):
    """A constructor that can't run without values, and draws random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in rates)
        self.rates = [rate * random.random() * np.random.random() for rate in rates]

    def forward(self, x: Tensor) -> Tensor:
        for rate, layer in zip(self.rates, self.layers, strict=True):
            x = x + rate * layer(x)
        return x


def on_vectors(shared: Callable[[], nn.Module], width: int = 4) -> Callable[[], MultiTaskModel]:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        return two_heads(shared(), line(width), line(width))

    return build


def single(samples: int = 6) -> dict[str, Tensor]:
    return {key: value.float() for key, value in vectors(samples, 0).items()}


@pytest.mark.parametrize(("shared", "width"), [(Hides, 4), (ReadsValues, 3)])
def test_unusual_modules_need_what_is_predicted(shared: type[nn.Module], width: int) -> None:
    assert_predicted(on_vectors(shared, width), single(), TWO_WAYS)


def test_tensors_that_hide_outside_of_modules_are_met() -> None:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        scale = torch.ones(4)  # made on whatever device the model is built on
        return two_heads(trunk(lambda f: f * scale), line(), line())

    training = FakeTraining(build, single())
    model = build()
    optimizer = adamw(model)
    Engine(model, optimizer).step([single()])
    report = measured(model, optimizer, single(), way_of())
    assert 0 <= training.predict().peak_bytes - report.peak_bytes <= 4 * 4, "it is counted, once"


def test_parameters_and_buffers_that_share_memory_share_it_again() -> None:
    def build() -> MultiTaskModel:
        model = three_heads()
        flat = torch.zeros(1000)
        model.trunk.register_buffer("flat", flat)
        model.task("seg").head.register_buffer("same", flat)
        model.task("cls").head.register_buffer("part", flat[10:20].view(2, 5))
        weights = torch.rand(24 + 3)
        layer = model.task("cls").head[2]
        layer.weight, layer.bias = nn.Parameter(weights[:24].view(3, 8)), nn.Parameter(weights[24:])
        return model

    assert_predicted(build, dense_batch(), TWO_WAYS)


def test_layers_of_every_kind_need_what_is_predicted() -> None:
    """Moment by moment, since a peak shows one of them only."""

    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        layers: list[nn.Module] = [
            *(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Softplus(), nn.PReLU(), nn.Dropout2d(0.2)),
            *(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.LayerNorm(12), nn.LocalResponseNorm(2)),
            *(nn.RReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.Hardswish()),
            *(
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.ReflectionPad2d(1),
                nn.Conv2d(8, 8, 3, groups=8),
            ),
            *(nn.Conv2d(8, 8, 3, dilation=2, padding=2), nn.ConvTranspose2d(8, 8, 2, 2), nn.GLU(1)),
            *(nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Softmax(1), nn.LogSigmoid()),
        ]
        return two_heads(nn.Sequential(*layers), line(9), line(9), inputs="image")

    assert_same_moments(build, dense_batch(4), way_of("split", 2))


def test_attention_needs_what_is_predicted() -> None:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return two_heads(
            nn.Sequential(nn.Linear(3, 32), encoder), line(32), nn.Sequential(nn.LayerNorm(32), line(32))
        )

    assert_predicted(build, {"x": torch.randn(6, 17, 3)}, TWO_WAYS)


def test_channels_last_is_predicted_as_it_is() -> None:
    batch = dense_batch()
    batch["image"] = batch["image"].contiguous(memory_format=torch.channels_last)
    assert_predicted(lambda: three_heads().to(memory_format=torch.channels_last), batch, TWO_WAYS)


# --- batches -----------------------------------------------------------------------------------------------


def test_entries_that_are_no_tensors_pass_through() -> None:
    batch = {
        **single(),
        "path": ["a"] * 6,
        "pair": ("x", 3),
        "n": 3,
        "none": None,
        "array": np.zeros((6, 2)),
        "o": object(),
    }
    assert_predicted(on_vectors(lambda: trunk(lambda f: f)), batch, TWO_WAYS)


def test_entries_that_share_memory_count_once() -> None:
    large = torch.rand(40, 5)
    batch = {"x": large[3:9, :3], "y": large[3:9, 3:4], "again": large[3:9]}
    assert_predicted(lambda: labelled("x", "y", distance("y")).float(), batch, TWO_WAYS)
    assert FakeTraining(lambda: labelled("x", "y", distance("y")), batch).predict().by_kind["inputs"] == 800


@pytest.mark.parametrize(
    ("batch", "inputs", "target", "loss"),
    [
        (single(), "x", "y", distance("y")),
        (list(single().values()), 0, 1, distance(1)),
        (tuple(single().values()), 0, 1, distance(1)),
        (Scene(**single()), "x", "y", lambda prediction, batch: F.mse_loss(prediction, batch.y)),
    ],
    ids=["dict", "list", "tuple", "dataclass"],
)
def test_batches_of_every_kind_are_predicted(batch: Any, inputs: Any, target: Any, loss: Any) -> None:
    assert_predicted(lambda: labelled(inputs, target, loss), batch, TWO_WAYS)


def test_the_batch_is_left_as_it_is() -> None:
    batch = {**with_labels(cls=3), "list": [torch.rand(2)] * 8}
    batch["image"].requires_grad_()
    before, identities = copy.deepcopy(batch), [id(tensor) for tensor in tensors_of(batch)]
    versions = [tensor._version for tensor in tensors_of(batch)]
    training = FakeTraining(three_heads, batch)
    training.predict(*way_of("split", 4, recompute=("trunk",)))
    assert [id(tensor) for tensor in tensors_of(batch)] == identities
    for one, other in zip(tensors_of(batch), tensors_of(before), strict=True):
        assert torch.equal(one.nan_to_num(-7), other.nan_to_num(-7))
        assert one.requires_grad == other.requires_grad
        assert one.grad is None
    assert [tensor._version for tensor in tensors_of(batch)] == versions


def test_a_batch_that_is_too_small_is_said_and_nothing_is_spoilt() -> None:
    training = FakeTraining(on_vectors(lambda: trunk(lambda f: f)), single(2))
    before = training.predict()
    with pytest.raises(BatchError, match="can't split 2 samples into 3"):
        training.predict(accumulate=3)
    with pytest.raises(ConfigError, match="nope"):
        training.predict(StepOptions(recompute=("nope",)))
    assert training.predict() == before


# --- what can't be predicted -------------------------------------------------------------------------------


def in_head(run: Callable[[Any, Tensor], Tensor]) -> Callable[[], MultiTaskModel]:
    return lambda: two_heads(trunk(lambda f: f), Made(run, layer=line()), line())


VALUES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a boolean index": lambda self, f: self.layer(f[f[:, 0] > 0]),
    "nonzero": lambda self, f: self.layer(f[(f[:, 0] > 0).nonzero()[:, 0]]),
    "where with one argument": lambda self, f: self.layer(f[torch.where(f[:, 0] > 0)[0]]),
    "item": lambda self, f: self.layer(f) * f.sum().item(),
    "float": lambda self, f: self.layer(f) * float(f.sum()),
    "tolist": lambda self, f: self.layer(f) * sum(f[0].tolist()),
    "an if": lambda self, f: self.layer(f if f.sum() > 0 else -f),
    "unique": lambda self, f: self.layer(f) * len(f.long().unique()),
    "repeats": lambda self, f: self.layer(f).repeat_interleave(torch.arange(len(f)), 0),
    "allclose": lambda self, f: self.layer(f if torch.allclose(f, f) else -f),
    "numpy": lambda self, f: self.layer(f) * float(f.detach().numpy().sum()),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_module_that_needs_values_is_named(what: str) -> None:
    with pytest.raises(PredictionError, match=r"without values.*\(after tasks\.a\.head(\.layer)? began\)"):
        FakeTraining(in_head(VALUES[what]), single())


LOSSES: dict[str, Callable[[Tensor, Any], Any]] = {
    "item": lambda prediction, batch: prediction.mean() * batch["y"].sum().item(),
    "a boolean index": lambda prediction, batch: prediction[batch["y"][:, 0] > -9].mean(),
    "an if": lambda prediction, batch: prediction.mean() if (batch["y"] > 0).any() else prediction.sum(),
}


@pytest.mark.parametrize("what", LOSSES)
def test_the_module_before_a_loss_that_needs_values_is_named(what: str) -> None:
    with pytest.raises(PredictionError, match=r"without values.*\(after tasks\.a\.head began\)"):
        FakeTraining(lambda: labelled("x", "y", LOSSES[what]), single())


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: nn.LSTM(3, 4, batch_first=True), "trunk"),
        (lambda: nn.GRU(3, 4, batch_first=True), "trunk"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.RNN(3, 4)), "trunk.1"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.GRUCell(3, 4)), "trunk.1"),
    ],
)
def test_recurrent_layers_are_named(layer: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(PredictionError, match=rf"recurrent layers .*: {re.escape(name)}\. Measure it: "):
        FakeTraining(lambda: two_heads(layer(), on(lambda f: f[0]), on(lambda f: f[0])), sequences(4, 0))


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)])
def test_recurrent_functions_are_named_as_layers_are(kind: str, gates: int) -> None:
    weights = [torch.rand(gates * 4, n) for n in (3, 4)] + [torch.rand(gates * 4)] * 2

    def cell(self: Any, f: Tensor) -> Tensor:
        h = f.new_zeros(len(f), 4)
        found: Any = getattr(torch, f"{kind}_cell")(f, [h, h] if kind == "lstm" else h, *weights)
        return found[0] if kind == "lstm" else found

    def layer(self: Any, f: Tensor) -> Tensor:
        h = f.new_zeros(1, len(f), 4)
        options = (
            True,
            1,
            0.0,
            True,
            False,
            True,
        )  # biases, layers, dropout, training, both ways, batch first
        found = getattr(torch, kind)(f[:, None], [h, h] if kind == "lstm" else h, weights, *options)
        result: Tensor = found[0][:, 0]
        return result

    for function, name in ((cell, f"{kind}_cell"), (layer, kind)):
        with pytest.raises(PredictionError, match=rf"recurrent layers .*: torch\.{name}\. Measure it: "):
            FakeTraining(lambda f=function: two_heads(Made(f), line(), line()), {"x": torch.rand(6, 3)})


def test_torchscript_and_lazy_modules_are_named() -> None:
    scripted = torch.jit.script(nn.Linear(3, 4))
    with pytest.raises(PredictionError, match=r"TorchScript modules .*: trunk\.1\. Measure it: "):
        FakeTraining(
            lambda: two_heads(nn.Sequential(nn.Linear(3, 3), scripted), line(), line()),
            {"x": torch.rand(6, 3)},
        )
    with pytest.raises(ConfigError, match=r"no shapes yet: trunk\.weight, trunk\.bias\. In build_model"):
        FakeTraining(lambda: two_heads(nn.LazyLinear(4), line(), line()), {"x": torch.rand(6, 3)})


def test_nested_tensors_are_said_to_need_values() -> None:
    def nest(self: Any, f: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(f, torch.tensor([0, 2, 6]))
        result: Tensor = self.layer(nested).values()
        return result

    with pytest.raises(PredictionError, match="can't be predicted"):
        FakeTraining(
            lambda: two_heads(Made(nest, layer=nn.Linear(3, 4)), line(), line()), {"x": torch.rand(6, 3)}
        )


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_named(kind: type[nn.Module]) -> None:
    shared = Made(lambda self, x: self.table(x).reshape(len(x), -1)[:, :4], table=kind(10, 4, sparse=True))
    with pytest.raises(PredictionError, match=r"sparse gradients .*: trunk\.table\."):
        FakeTraining(lambda: two_heads(shared, line(), line()), {"x": torch.randint(10, (6, 3))})


def test_sparse_tensors_are_named() -> None:
    build = on_vectors(lambda: trunk(lambda f: f))
    with pytest.raises(PredictionError, match="layout torch.sparse_coo"):
        FakeTraining(build, {**single(), "adjacency": torch.eye(6).to_sparse()})

    def with_buffer() -> MultiTaskModel:
        model = build()
        model.trunk.register_buffer("adjacency", torch.eye(6).to_sparse())
        return model

    with pytest.raises(PredictionError, match="layout torch.sparse_coo"):
        FakeTraining(with_buffer, single())


def test_inputs_that_need_values_are_said_to() -> None:
    model = lambda: two_heads(trunk(lambda f: f), line(), line(), inputs=lambda b: b["x"][b["x"][:, 0] > -9])  # noqa: E731
    with pytest.raises(PredictionError, match=r"aten\.nonzero\.default \(in the step\)"):
        FakeTraining(model, single())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_errors_stay_what_they_are(caplog: pytest.LogCaptureFixture) -> None:
    def broken(self: Any, f: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(TaskError, match="task 'a' .*mine"):
        FakeTraining(in_head(broken), single())
    with pytest.raises(OptimizerError, match="doesn't hold 4 trainable"):
        FakeTraining(
            in_head(lambda self, f: self.layer(f)),
            single(),
            build_optimizer=lambda model: torch.optim.SGD(model.trunk.parameters(), lr=0.1),
        )
    with pytest.raises(ConfigError, match="has no effect"):
        FakeTraining(
            lambda: in_head(lambda self, f: self.layer(f))().double(),
            vectors(4, 0),
            options=StepOptions(precision="bf16"),
        )

    def fails() -> MultiTaskModel:
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        FakeTraining(fails, single())


# --- nothing else happens ----------------------------------------------------------------------------------


def resident_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(text.split()[1]) * 1024 for text in lines if text.startswith("VmHWM"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_gigabytes_are_predicted_without_taking_them() -> None:
    width = 2**14

    def build() -> MultiTaskModel:
        return two_heads(nn.Linear(width, width, bias=False), line(width), nn.Linear(width, width))

    batch = {"x": torch.rand(4, width)}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = resident_peak_bytes()
    training = FakeTraining(build, batch, copies=1)
    prediction = training.predict(accumulate=2)
    weights = 2 * width * width * 4
    assert prediction.start_bytes > 4 * weights, "weights, their average, and two moments"
    assert prediction.peak_bytes > 5 * weights
    assert resident_peak_bytes() - before < weights / 8


def draws() -> MultiTaskModel:
    """Random numbers of PyTorch, NumPy and Python in the forward."""

    def run(self: Any, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5) * random.random() * float(np.random.standard_normal())

    return two_heads(Made(run, layer=line(3, 4)), line(), line())


@pytest.mark.parametrize("build", [draws, on_vectors(ReadsValues, 3)])
def test_random_states_stay_as_they_are(build: Callable[[], MultiTaskModel]) -> None:
    torch_state, other, python = torch.get_rng_state(), RandomState(), random.getstate()
    training = FakeTraining(build, single())
    for way in (way_of("split", 3), way_of("sequential", 2, recompute=("trunk",)), way_of("summed")):
        training.predict(*way)
    predict_evaluation(training, 100)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert RandomState() == other
    assert random.getstate() == python


def test_random_states_stay_where_counts_need_a_real_model() -> None:
    other, python = RandomState(), random.getstate()

    def build() -> MultiTaskModel:  # without a seed of its own
        wide = nn.Sequential(nn.Conv2d(3, 5, 1))
        return MultiTaskModel(
            None, {"seg": Segmentation(5, head=wide, target="seg", class_weights=[1.0] * 5)}, inputs="image"
        )

    batch = dense_batch()
    batch["image"] = batch["image"][:, :, :10, :10]
    FakeTraining(build, batch).predict(accumulate=2)
    assert RandomState() == other
    assert random.getstate() == python


def test_nobody_is_warned_by_a_prediction_and_everybody_by_the_step() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FakeTraining(dense_model, dense_batch()).predict(*way_of("split", 3, recompute=("trunk",)))
    assert [str(warning.message) for warning in caught] == []
    model = dense_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine(model, adamw(model)).step(split_batch(dense_batch(), 3))
    assert [warning.category for warning in caught] == [InexactWarning]


def test_predictions_repeat() -> None:
    training = FakeTraining(three_heads, dense_batch())
    way = way_of("split", 3, recompute=("trunk",))
    first = training.predict(*way, timeline=True)
    training.predict(StepOptions("sequential"))
    assert training.predict(*way, timeline=True) == first
    assert FakeTraining(three_heads, dense_batch()).predict(*way, timeline=True) == first
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_what_is_built_stays_fake() -> None:
    training = FakeTraining(three_heads, dense_batch(), copies=1)
    training.predict()
    held = [*training.model.parameters(), *training.model.buffers(), *training.copies]
    for tensor in (*held, *state_tensors(training.optimizer)):
        assert isinstance(tensor, FakeTensor)
        assert tensor.device == torch.device("cpu")


# --- FLOPs, timelines, evaluation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [way_of(s, k, recompute=r) for s in SCHEDULE_NAMES for k, r in ((1, ()), (4, ("trunk",)))],
    ids=str,
)
def test_flops_are_those_of_the_real_step(way: Way) -> None:
    model = three_heads()
    engine = Engine(model, adamw(model), options=way.options)
    with FlopCounterMode(display=False) as counter:
        engine.step(split_batch(dense_batch(8), way.accumulate))
    assert FakeTraining(three_heads, dense_batch(8)).predict(*way).flops == counter.get_total_flops()


def test_flops_of_uneven_micro_batches_are_those_of_the_whole() -> None:
    training = FakeTraining(three_heads, dense_batch(7))
    assert {training.predict(accumulate=k).flops for k in (1, 2, 3, 5, 7)} == {training.predict().flops}


def test_flops_of_micro_batches_that_lack_labels_are_counted_for_each_kind() -> None:
    batch = dense_batch(8)
    batch["seg"][2:] = 255  # so that of 8 micro-batches 2 run all heads, and 6 run all but one
    training = FakeTraining(three_heads, batch)
    for micro_batches in (1, 2, 4, 8):
        model = three_heads()
        with FlopCounterMode(display=False) as counter:
            Engine(model, adamw(model)).step(split_batch(batch, micro_batches))
        assert training.predict(accumulate=micro_batches).flops == counter.get_total_flops()
        assert training.leaves_out(micro_batches) == (micro_batches > 1)
    assert training.predict(accumulate=8).flops < training.predict().flops


def test_flops_of_known_layers() -> None:
    def build() -> MultiTaskModel:
        return two_heads(nn.Linear(3, 50), nn.Linear(50, 7), nn.Linear(50, 9))

    samples, heads = 6, 50 * 7 + 50 * 9
    training = FakeTraining(build, single(samples))
    forward = 2 * samples * 3 * 50
    # a backward takes twice a forward, but no gradient goes to the inputs
    assert training.predict().flops == 2 * forward + 3 * 2 * samples * heads
    assert training.predict(StepOptions(recompute=("trunk",))).flops == 3 * forward + 3 * 2 * samples * heads
    assert training.predict(StepOptions("sequential")).flops == 4 * forward + 3 * 2 * samples * heads


def test_a_timeline_is_that_of_the_real_step() -> None:
    way = way_of("split", 2)
    assert_same_moments(three_heads, dense_batch(), way)
    prediction = FakeTraining(three_heads, dense_batch()).predict(*way, timeline=True)
    assert max(moment.live_bytes for moment in prediction.timeline) == prediction.peak_bytes
    assert not any(moment.op.startswith("prim.") for moment in prediction.timeline)
    assert FakeTraining(three_heads, dense_batch()).predict(*way).timeline == ()


@pytest.mark.parametrize("samples", [6, 3])
def test_an_evaluation_needs_what_is_predicted(samples: int) -> None:
    training = FakeTraining(three_heads, dense_batch(6), copies=1)
    model, batch = three_heads(), dense_batch(samples)
    optimizer = adamw(model)
    Engine(model, optimizer).step([dense_batch(6)])
    live = LiveBytes([model, copy.deepcopy(model), *state_tensors(optimizer), *batch.values()])
    average = [torch.empty_like(t) for t in (*model.parameters(), *model.buffers())]
    fixed = sum(tensor.nbytes for tensor in average)
    with live, evaluating(model):
        model(batch)
    assert predict_evaluation(training, samples) == pytest.approx(live.peak_bytes + fixed, rel=0.01)
    assert all(module.training for module in training.model.modules())


# --- for a CUDA card ---------------------------------------------------------------------------------------


def test_on_cuda_only_the_micro_batch_that_runs_is_there() -> None:
    training = FakeTraining(three_heads, dense_batch(8), device="cuda")
    whole, quarter = training.predict(), training.predict(accumulate=4)
    assert whole.by_kind["inputs"] == 4 * quarter.by_kind["inputs"]
    assert whole.by_kind["inputs"] == sum(tensor.nbytes for tensor in dense_batch(8).values())


def test_on_cuda_optimizers_work_on_lists_unless_told_otherwise() -> None:
    def peak(device: str, **settings: Any) -> tuple[str, int]:
        def build() -> MultiTaskModel:
            layers = [nn.Linear(200, 200) for _ in range(8)]
            return two_heads(nn.Sequential(nn.Linear(3, 200), *layers), line(200), line(200))

        def optimizer(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.parameters(), **settings)

        training = FakeTraining(build, single(2), device=device, build_optimizer=optimizer)
        prediction = training.predict()
        return prediction.stage, prediction.by_kind["temporaries"]

    assert peak("cuda") == peak("cuda", foreach=True)
    assert peak("cuda")[1] > 3 * peak("cuda", foreach=False)[1]
    assert peak("cpu") == peak("cpu", foreach=False)


def test_offloaded_activations_leave_the_card() -> None:
    training = FakeTraining(dense_model, dense_batch(), device="cuda")
    kept, away = training.predict(), training.predict(StepOptions(offload=True))
    assert away.peak_bytes < kept.peak_bytes
    assert away.by_kind["activations"] < 0.5 * kept.by_kind["activations"]
    assert away.flops == kept.flops


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_what_stays_is_what_is_predicted() -> None:
    training = FakeTraining(three_heads, dense_batch(8), device="cuda")
    prediction = training.predict(accumulate=4)
    model = three_heads().cuda()
    optimizer = adamw(model)
    Engine(model, optimizer).step(split_batch(dense_batch(8), 4))
    report = measured(model, optimizer, dense_batch(8), way_of("split", 4))
    for kind in ("parameters", "gradients", "inputs"):
        assert prediction.by_kind[kind] == report.by_kind[kind]
