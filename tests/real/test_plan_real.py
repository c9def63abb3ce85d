"""Backbones as timm builds them: steps are predicted as they run, and a planned step stays in its budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from ways import Way, way_of

from mtaccum import Classification, Engine, MultiTaskModel, Segmentation, split_batch
from mtaccum.memory import FakeTraining, measure_step
from mtaccum.planning import Budget, plan_training

timm = pytest.importorskip("timm", reason="needs the extra vision")
pytest.importorskip("torchvision", reason="needs the extra vision")

pytestmark = pytest.mark.filterwarnings("ignore::mtaccum.InexactWarning")

SAMPLES, CLASSES = 4, 3


class LastMap(nn.Module):
    """The last of a backbone's maps, channels first."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.body = timm.create_model(name, features_only=True, **settings)
        self.channels = self.body.feature_info.channels()[-1]

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.body(image)[-1]
        return features if features.shape[1] == self.channels else features.permute(0, 3, 1, 2)


TRUNKS: dict[str, tuple[int, Callable[[], LastMap]]] = {
    "resnet18": (64, lambda: LastMap("resnet18", out_indices=(1, 2, 3))),
    "vit_tiny_patch16_224": (48, lambda: LastMap("vit_tiny_patch16_224", img_size=48, depth=4)),
    "convnext_atto": (64, lambda: LastMap("convnext_atto", depths=(1, 1, 2, 1))),
    "swin_tiny": (
        64,
        lambda: LastMap("swin_tiny_patch4_window7_224", img_size=64, window_size=2, depths=(1, 1, 2, 1)),
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}
OPTIMIZER_OF = {
    "resnet18": "AdamW",
    "vit_tiny_patch16_224": "SGD",
    "convnext_atto": "AdamW",
    "swin_tiny": "SGD",
}


def build_of(name: str) -> Callable[[], MultiTaskModel]:
    def build() -> MultiTaskModel:
        torch.manual_seed(0)
        trunk = TRUNKS[name][1]()
        width = trunk.channels
        dense = nn.Sequential(
            nn.Conv2d(width, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, CLASSES, 1)
        )
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
        tasks = {
            "seg": Segmentation(CLASSES, head=dense, target="seg"),
            "cls": Classification(CLASSES, head=pooled),
        }
        return MultiTaskModel(trunk, tasks, inputs="image")

    return build


@cache
def batch_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    size = TRUNKS[name][0]
    image = torch.rand(SAMPLES, 3, size, size)
    side = build_of(name)().trunk(image[:1]).shape[-1]  # type: ignore[misc]
    return {
        "image": image,
        "seg": torch.randint(CLASSES, (SAMPLES, side, side)),
        "cls": torch.randint(CLASSES, (SAMPLES,)),
    }


@cache
def training_of(name: str, optimizer: str) -> FakeTraining:
    return FakeTraining(build_of(name), batch_of(name), build_optimizer=OPTIMIZERS[optimizer])


@cache
def model_of(name: str, optimizer: str) -> tuple[MultiTaskModel, Optimizer]:
    """A real model after its first step."""
    model = build_of(name)()
    made = OPTIMIZERS[optimizer](model)
    Engine(model, made).step([batch_of(name)])
    return model, made


@pytest.fixture(autouse=True, scope="module")
def _forgotten_at_the_end() -> Iterator[None]:
    yield
    for function in (batch_of, training_of, model_of):
        function.cache_clear()


def measured(name: str, optimizer: str, way: Way) -> int:
    model, made = model_of(name, optimizer)
    engine = Engine(model, made, options=way.options)
    gc.collect()
    return measure_step(engine, split_batch(batch_of(name), way.accumulate))[1].peak_bytes


WAYS = [
    way_of("summed", 4, recompute=("trunk",)),
    way_of("sequential"),
    way_of("split", recompute=("trunk",)),
]


@pytest.mark.parametrize(("name", "optimizer"), OPTIMIZER_OF.items())
def test_steps_of_backbones_need_what_is_predicted(name: str, optimizer: str) -> None:
    training = training_of(name, optimizer)
    for way in WAYS:
        predicted = training.predict(*way).peak_bytes
        assert predicted == pytest.approx(measured(name, optimizer, way), rel=1e-3), way


@pytest.mark.parametrize("name", TRUNKS)
def test_planned_steps_of_backbones_stay_in_their_budget(name: str) -> None:
    training = training_of(name, OPTIMIZER_OF[name])
    summed, least = (training.predict(*way) for way in (way_of("summed"), WAYS[-1]))
    budget = (summed.peak_bytes + min(least.peak_bytes, summed.peak_bytes)) // 2
    report = plan_training(training, Budget(budget, 0, "cpu"))
    plan = report.recommended
    assert plan is not None
    assert plan.peak_bytes <= budget
    assert measured(name, OPTIMIZER_OF[name], Way(plan.options, plan.accumulate)) <= 1.01 * budget
