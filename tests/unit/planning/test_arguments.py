"""What find_plan is given: models that are there stay as they are, and wrong arguments are explained."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtaccum import (
    BatchError,
    Classification,
    ConfigError,
    MtaccumError,
    MultiTaskModel,
    PredictionError,
    Segmentation,
    TaskError,
    find_plan,
)

CLASSES = 3


def batch(samples: int = 4, **entries: Any) -> dict[str, Any]:
    made = {
        "image": torch.rand(samples, 3, 8, 8),
        "seg": torch.randint(CLASSES, (samples, 8, 8)),
        "cls": torch.randint(CLASSES, (samples,)),
    }
    return {
        name: entries.get(name, value) for name, value in made.items() if entries.get(name, 0) is not None
    }


class Tied(nn.Module):
    """A body whose weight a head shares, with a buffer, a tensor in a list, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.scales = [torch.full((1,), 0.5)]

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.norm(self.conv(image)) * self.scales[0]
        return features


def build() -> MultiTaskModel:
    trunk = Tied()
    again = nn.Conv2d(3, CLASSES, 3, padding=1)
    again.weight = trunk.conv.weight
    tasks = {
        "seg": Segmentation(CLASSES, head=again, target="seg"),
        "cls": Classification(CLASSES, head=nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES))),
    }
    return MultiTaskModel(trunk, tasks, inputs="image")


def test_a_model_that_is_there_already_stays_as_it_is() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {name: value.data_ptr() for name, value in model.state_dict().items()}

    report = find_plan(lambda: model, batch(), budget_bytes="10MiB")
    with pytest.raises(MtaccumError, match="nothing fits"):
        find_plan(lambda: model, batch(), budget_bytes=100)

    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == tensors
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.trunk.scales[0]) is Tensor  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model(batch())["cls"].shape == (4, CLASSES)
    assert report.recommended is not None
    built = find_plan(build, batch(), budget_bytes="10MiB").recommended
    assert built is not None
    assert report.recommended.peak_bytes == built.peak_bytes
    assert report.recommended.options == built.options
    assert report.recommended.accumulate == built.accumulate


def test_modules_of_ones_own_stay_as_they_are() -> None:
    trunk, head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, CLASSES, 1)

    def wrapped() -> MultiTaskModel:
        return MultiTaskModel(trunk, {"seg": Segmentation(CLASSES, head=head, target="seg")}, inputs="image")

    find_plan(wrapped, batch(), budget_bytes="10MiB")

    for parameter in (*trunk.parameters(), *head.parameters()):
        assert type(parameter) is nn.Parameter
        assert parameter.isfinite().all()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


FUNCTION = r"build_model must be a function that returns a MultiTaskModel, got "
RETURNED = r"build_model must return a MultiTaskModel, and it returned "
OPTIMIZER = r"build_optimizer must be a function of the model .* lambda model: .*, got "
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a model": (build(), {}, FUNCTION + "MultiTaskModel. For a model that is there .* lambda: model"),
    "no function": (None, {}, FUNCTION + "NoneType"),
    "returns None": (lambda: None, {}, RETURNED + "NoneType"),
    "returns a list": (lambda: [build()], {}, RETURNED + r"list\(MultiTaskModel\)"),
    "returns a module": (lambda: nn.Linear(2, 2), {}, RETURNED + "Linear"),
    "an optimizer's name": (build, {"build_optimizer": "adamw"}, OPTIMIZER + "str"),
    "an optimizer's class": (build, {"build_optimizer": torch.optim.AdamW}, OPTIMIZER + "AdamW"),
    "an optimizer": (build, {"build_optimizer": adamw(build())}, OPTIMIZER + "AdamW"),
    "no optimizer": (
        build, {"build_optimizer": lambda model: None}, "must return an optimizer, such as .*NoneType"
    ),
    "planned options": (
        build, {"recompute": ["trunk"], "schedule": "summed", "precision": "bf16"},
        "^recompute, schedule: a plan chooses that",
    ),
    "no option": (build, {"groups": []}, "unknown option of a step 'groups'. Did you mean 'head_groups'"),
    "no device": (build, {"device": "gpu"}, "can be planned for cpu and cuda, not for 'gpu'"),
    "None for a device": (build, {"device": None}, "can be planned for cpu and cuda, not for None"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_with_what_is_valid(what: str) -> None:
    build_model, arguments, message = WRONG[what]
    with pytest.raises(ConfigError, match=message):
        find_plan(build_model, batch(), **{"budget_bytes": "10MiB", **arguments})


NO_LABELS = r"no label of any task \(seg, cls\): give one with labels of all"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([batch()], NO_LABELS),
        ((batch()["image"], batch()["seg"]), NO_LABELS),
        (batch(seg=None, cls=None), NO_LABELS),
        (batch(seg=torch.full((4, 8, 8), 255), cls=torch.full((4,), -100)), NO_LABELS),
        ({name: value.to("meta") for name, value in batch().items()}, "is on the device meta"),
    ],
    ids=["a list of batches", "a tuple", "no labels", "ignored labels", "meta"],
)
def test_batches_that_tell_nothing_are_refused(given: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        find_plan(build, given, budget_bytes="10MiB")


def test_where_no_task_is_trained_that_is_said() -> None:
    def off() -> MultiTaskModel:
        model = build()
        for task in model.tasks_by_name().values():
            task.weight = 0.0
        return model

    with pytest.raises(ConfigError, match="no task is trained"):
        find_plan(off, batch(), budget_bytes="10MiB")


def test_a_real_model_that_cant_be_copied_is_explained() -> None:
    model = build()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(PredictionError, match="a model with real parameters is copied .* can't be: .*lock"):
        find_plan(lambda: model, batch(), budget_bytes="10MiB")


def test_a_task_without_labels_is_said_not_to_be_planned_for() -> None:
    report = find_plan(build, batch(seg=None), budget_bytes="10MiB")
    assert "note: no label of seg was found, so it is not planned for" in str(report)
    assert "no label" not in str(find_plan(build, batch(), budget_bytes="10MiB"))


def test_labels_of_another_size_are_said_to_fail() -> None:
    with pytest.raises(TaskError, match=r"a step fails on this batch: .*size.* Engine.step on it says where"):
        find_plan(build, batch(seg=torch.zeros(4, 5, 8, dtype=torch.long)), budget_bytes="10MiB")


class Causal(nn.Module):
    def __init__(self, **told: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.told = nn.TransformerEncoder(layer, 1), told

    def forward(self, image: Tensor) -> Tensor:
        rows = image.flatten(2)[:, :, :8]
        mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1])
        out: Tensor = self.encoder(rows, mask=mask, **self.told)
        return out


def causal(**told: Any) -> MultiTaskModel:
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, CLASSES))
    return MultiTaskModel(Causal(**told), {"cls": Classification(CLASSES, head=head)}, inputs="image")


def test_a_transformer_that_looks_at_its_mask_is_told_how_not_to() -> None:
    with pytest.raises(
        PredictionError, match=r"trunk.encoder .* looks whether its mask is causal, .*is_causal="
    ):
        find_plan(causal, batch(), budget_bytes="10MiB")
    assert find_plan(lambda: causal(is_causal=True), batch(), budget_bytes="10MiB").recommended is not None
