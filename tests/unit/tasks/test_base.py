"""Task: its settings, its defaults, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtaccum import BatchError, ConfigError, Task, TaskError
from mtaccum.batch import Inputs


class Plain(Task):
    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return prediction.mean()


@pytest.mark.parametrize("weight", [-1.0, -1e-9, math.nan, math.inf, -math.inf, "1", None, True])
def test_a_weight_that_is_no_finite_number_from_0_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"weight must be a finite number of at least 0, got"):
        Plain(nn.Identity(), None, weight=weight)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_the_same_when_it_is_changed_later(weight: float) -> None:
    task = Plain(nn.Identity(), None, weight=2)
    with pytest.raises(ConfigError, match="weight"):
        task.weight = weight
    assert task.weight == 2.0


@pytest.mark.parametrize(
    ("weight", "mode", "enabled"),
    [
        (1.0, "train", True),
        (0.5, "frozen", True),
        (1.0, "detached", True),
        (1.0, "off", False),
        (0.0, "train", False),
        (0, "frozen", False),
    ],
)
def test_off_and_weight_0_disable_a_task_and_nothing_else_does(
    weight: float, mode: str, enabled: bool
) -> None:
    assert Plain(nn.Identity(), None, weight=weight, mode=mode).enabled is enabled


def test_an_unknown_mode_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"'freeze'.*Did you mean 'frozen'\?.*detached, frozen, off, train"):
        Plain(nn.Identity(), None, mode="freeze")


def test_a_head_that_is_no_module_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"got function.*torch\.nn\.Identity"):
        Plain(lambda features: features, None)


def test_on_is_a_name_or_several() -> None:
    assert Plain(nn.Identity(), None).on == ("trunk",)
    assert Plain(nn.Identity(), None, on=["trunk", "fpn"]).on == ("trunk", "fpn")


def test_a_task_without_a_loss_says_so() -> None:
    with pytest.raises(TaskError, match=r"Task has no loss\(\)"):
        Task(nn.Identity(), None).loss(torch.zeros(1), {})


@pytest.mark.parametrize(
    ("target", "batch", "count"),
    [
        ("y", {"x": torch.zeros(5, 2), "y": torch.zeros(5)}, 5),
        ("y", {"x": torch.zeros(5, 2), "y": [{}] * 5}, 5),
        ("y", {"x": torch.zeros(5, 2), "y": torch.zeros(0)}, 0),
        ("y", {"x": torch.zeros(5, 2)}, 0),
        ("y", {"x": torch.zeros(5, 2), "y": None}, 0),
        (None, {"x": torch.zeros(5, 2), "y": None}, 5),
        (1, (torch.zeros(5, 2), torch.zeros(5)), 5),
        (1, (torch.zeros(5, 2),), 0),
        ("y", {"x": torch.zeros(5, 2), "y": {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5)}}, 5),
        ("y", {"x": torch.zeros(5, 2), "y": (torch.zeros(5, 4), torch.zeros(5), torch.zeros(5))}, 5),
    ],
    ids=[
        "tensor",
        "list",
        "empty",
        "absent",
        "None",
        "no target",
        "position",
        "no such position",
        "dict of fields",
        "tuple of fields",
    ],
)
def test_default_count_is_the_number_of_samples_with_the_target(target: Any, batch: Any, count: int) -> None:
    assert Plain(nn.Identity(), target).count(batch) == count


def test_count_of_a_batch_without_a_size_is_an_error() -> None:
    with pytest.raises(BatchError, match="how many samples"):
        Plain(nn.Identity(), None).count({"x": 3})


def test_several_inputs_reach_the_head_as_keyword_arguments() -> None:
    class Added(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left + 10 * right

    task = Plain(Added(), None)
    assert task(Inputs(left=torch.tensor(1), right=torch.tensor(2)), {}).item() == 21


def test_by_default_there_are_no_metrics_and_no_range() -> None:
    task = Plain(nn.Identity(), None)
    assert task.metrics() == {}
    assert task.label_range({"y": torch.zeros(1)}) is None
    assert task.additive is True
