"""The built-in tasks against closed forms."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mtaccum import BatchError, Classification, ConfigError, Regression, Segmentation, Task, TaskError

NAN = float("nan")
LOG3, LOG2 = math.log(3), math.log(2)


def seg(**settings: Any) -> Segmentation:
    return Segmentation(num_classes=3, head=nn.Identity(), **settings)


def cls(**settings: Any) -> Classification:
    return Classification(num_classes=3, head=nn.Identity(), **settings)


def reg(*arguments: Any, **settings: Any) -> Regression:
    return Regression(*arguments, head=nn.Identity(), **settings)


def number(value: Any) -> float:
    return float(value)


# --- classes: losses --------------------------------------------------------------------------------------


def test_uniform_logits_cost_the_logarithm_of_the_number_of_classes() -> None:
    assert cls().loss(torch.zeros(4, 3), {"cls": torch.tensor([0, 1, 2, 0])}).item() == pytest.approx(LOG3)
    loss = seg().loss(torch.zeros(2, 3, 4, 4), {"seg": torch.ones(2, 4, 4, dtype=torch.long)})
    assert loss.item() == pytest.approx(LOG3)


def test_ignored_pixels_count_neither_in_the_loss_nor_in_its_number() -> None:
    # two valid pixels: one costs log 3, the other, with logits log(2), 0, 0 and class 0, log(4/2)
    logits = torch.zeros(1, 3, 1, 3)
    logits[0, 0, 0, 1] = LOG2
    logits[0, :, 0, 2] = 1000.0
    batch = {"seg": torch.tensor([[[1, 0, 255]]])}
    assert seg().loss(logits, batch).item() == pytest.approx((LOG3 + LOG2) / 2)
    assert number(seg().count(batch)) == 2


def test_ignored_labels_leave_a_gradient_of_exactly_zero() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    cls().loss(logits, {"cls": torch.tensor([1, -100])}).backward()
    assert logits.grad[1].eq(0).all()
    assert logits.grad[0].ne(0).all()


def test_class_weights_weigh_the_loss_and_the_count_l6() -> None:
    task = cls(class_weights=[1.0, 0.5, 4.0])
    logits = torch.zeros(4, 3)
    logits[0, 0] = LOG2  # costs log 2 for class 0
    batch = {"cls": torch.tensor([0, 1, 2, -100])}
    assert number(task.count(batch)) == 5.5
    expected = (1.0 * LOG2 + 0.5 * LOG3 + 4.0 * LOG3) / 5.5
    assert task.loss(logits, batch).item() == pytest.approx(expected)


def test_labels_of_small_integer_types_are_read() -> None:
    batch = {"seg": torch.tensor([[[0, 255]]], dtype=torch.uint8)}
    assert seg().loss(torch.zeros(1, 3, 1, 2), batch).item() == pytest.approx(LOG3)
    assert number(seg().count(batch)) == 1


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (torch.tensor([0.7, 1.0]), "torch.float32"),  # the index 0, if it were cut off
        (torch.rand(2, 3).half(), "torch.float16"),
        (np.array([0, 1]), "ndarray"),
        ([0, 1], "list(int, int)"),
    ],
)
def test_what_can_not_be_classes_is_refused_rather_than_cut_off(labels: Any, named: str) -> None:
    for call in (cls().count, cls().label_range, lambda batch: cls().loss(torch.zeros(2, 3), batch)):
        with pytest.raises(BatchError, match=re.escape(named)) as caught:
            call({"cls": labels})
        assert "'cls'" in str(caught.value)


def test_regression_too_takes_tensors_only() -> None:
    with pytest.raises(BatchError, match=r"ndarray.*torch.as_tensor"):
        reg().count({"depth": np.zeros(2)})


def test_class_weights_follow_the_precision_of_the_logits() -> None:
    task = cls(class_weights=[1.0, 2.0, 3.0])
    loss = task.loss(torch.zeros(2, 3, dtype=torch.float64), {"cls": torch.tensor([0, 2])})
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(LOG3)


def test_class_weights_are_no_part_of_the_state() -> None:
    assert cls(class_weights=[1.0, 2.0, 3.0]).state_dict() == {}


@pytest.mark.parametrize("task", [seg(), cls(), reg()], ids=["seg", "cls", "reg"])
@pytest.mark.parametrize("batch", [{}, {"seg": None, "cls": None, "depth": None}], ids=["absent", "None"])
def test_without_a_target_nothing_counts_l4(task: Task, batch: dict[str, Any]) -> None:
    assert number(task.count(batch)) == 0


@pytest.mark.parametrize("task", [seg(), cls(class_weights=[1, 2, 3])], ids=["seg", "weighted"])
def test_all_labels_ignored_count_zero(task: Any) -> None:
    batch = {"seg": torch.full((2, 3, 3), 255), "cls": torch.full((4,), -100)}
    assert number(task.count(batch)) == 0


# --- classes: range ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "bounds"),
    [([0, 1, 2], (0, 2)), ([2, -100, 2], (0, 2)), ([-100], (0, 0)), ([1, 7], (1, 7)), ([-3, 1], (-3, 1))],
)
def test_label_range_leaves_out_ignored_labels(labels: list[int], bounds: tuple[int, int]) -> None:
    found = cls().label_range({"cls": torch.tensor(labels)})
    # ignored labels may stand in as the smallest class, which is always valid
    assert min(bounds[0], 0) <= found[0].item() <= bounds[0]
    assert found[1].item() == bounds[1]


def test_no_labels_have_no_range() -> None:
    assert cls().label_range({"cls": torch.zeros(0)}) is None


def test_a_label_out_of_range_does_not_break_the_weighted_count_l5() -> None:
    # it is label_range that reports it; an index error here would come first and say less
    task = cls(class_weights=[1.0, 2.0, 4.0])
    assert math.isfinite(number(task.count({"cls": torch.tensor([9, -7])})))


def test_limits_are_the_classes() -> None:
    assert cls().label_limits == (0, 2)


# --- regression -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "expected"), [("l1", (0.5 + 3) / 2), ("mse", (0.25 + 9) / 2), ("huber", (0.125 + 2.5) / 2)]
)
def test_regression_means_over_targets_that_are_not_nan(criterion: str, expected: float) -> None:
    task = reg(criterion=criterion)
    batch = {"depth": torch.tensor([[1.0], [NAN], [2.0]])}
    assert task.loss(torch.tensor([[1.5], [100.0], [-1.0]]), batch).item() == pytest.approx(expected)
    assert number(task.count(batch)) == 2


@pytest.mark.parametrize("criterion", ["l1", "mse", "huber"])
@pytest.mark.parametrize("missing", [NAN, 1e38])
def test_missing_targets_leave_no_trace_in_the_gradient_l2(criterion: str, missing: float) -> None:
    # masked after the arithmetic, a NaN target gives a finite loss and a NaN gradient
    target = torch.tensor([[1.0], [missing]])
    task = reg(criterion=criterion, mask="valid")
    prediction = torch.tensor([[3.0], [5.0]], requires_grad=True)
    loss = task.loss(prediction, {"depth": target, "valid": torch.tensor([[True], [False]])})
    loss.backward()
    assert math.isfinite(loss.item())
    assert prediction.grad[1].item() == 0
    assert prediction.grad[0].item() == {"l1": 1.0, "mse": 4.0, "huber": 1.0}[criterion]


def test_a_prediction_that_is_nan_where_there_is_no_label_does_no_harm() -> None:
    prediction = torch.tensor([[3.0], [NAN]], requires_grad=True)
    reg().loss(prediction, {"depth": torch.tensor([[1.0], [NAN]])}).backward()
    assert prediction.grad.tolist() == [[1.0], [0.0]]


def test_mask_and_nan_both_take_labels_away() -> None:
    task = reg(dense=True, mask="valid")
    batch = {
        "depth": torch.tensor([[[[1.0, NAN, 3.0, 4.0]]]]),
        "valid": torch.tensor([[[[1, 1, 0, 1]]]]),  # any type that can be read as yes and no
    }
    assert number(task.count(batch)) == 2
    assert task.loss(torch.zeros(1, 1, 1, 4), batch).item() == pytest.approx(2.5)


def test_a_mask_without_channels_counts_for_all_of_them() -> None:
    task = reg(2, dense=True, mask="valid")
    batch = {"depth": torch.ones(3, 2, 1, 2), "valid": torch.tensor([True, False]).expand(3, 1, 1, 2)}
    assert number(task.count(batch)) == 6
    assert task.loss(torch.zeros(3, 2, 1, 2), batch).item() == 1.0


@pytest.mark.parametrize(
    ("prediction", "target"), [((4, 1), (4,)), ((4, 1, 2, 3), (4, 2, 3)), ((4, 2), (4, 2)), ((4,), (4,))]
)
def test_a_scalar_target_may_lack_the_channel(prediction: tuple[int, ...], target: tuple[int, ...]) -> None:
    loss = reg().loss(torch.zeros(prediction), {"depth": torch.full(target, 2.0)})
    assert loss.item() == 2.0


@pytest.mark.parametrize(
    ("prediction", "target"), [((4,), (4, 1)), ((4, 2), (4,)), ((4, 1, 4, 4), (4, 1, 8, 8)), ((4, 1), (5, 1))]
)
def test_shapes_that_would_broadcast_by_accident_are_refused(
    prediction: tuple[int, ...], target: tuple[int, ...]
) -> None:
    with pytest.raises(TaskError) as caught:
        reg().loss(torch.zeros(prediction), {"depth": torch.zeros(target)})
    assert str(prediction) in str(caught.value)
    assert str(target) in str(caught.value)


def test_integer_and_double_targets_are_taken_in_the_precision_of_the_prediction() -> None:
    for target in (torch.tensor([[1], [4]]), torch.tensor([[1.0], [4.0]], dtype=torch.float64)):
        loss = reg().loss(torch.zeros(2, 1), {"depth": target})
        assert (loss.item(), loss.dtype) == (2.5, torch.float32)


# --- sizes, heads, settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [seg(size_like="seg"), reg(3, dense=True, size_like="seg")])
def test_dense_predictions_are_resized_like_an_entry(task: Task) -> None:
    batch = {"seg": torch.zeros(2, 8, 12)}
    small = torch.rand(2, 3, 4, 6)
    resized = task(small, batch)
    expected = nn.functional.interpolate(small, size=(8, 12), mode="bilinear", align_corners=False)
    assert torch.equal(resized, expected)
    fitting = torch.rand(2, 3, 8, 12)
    assert task(fitting, batch) is fitting


@pytest.mark.parametrize(
    ("task", "shape"),
    [
        (Segmentation(num_classes=5, in_channels=4, hidden=8), (2, 5, 6, 6)),
        (Classification(num_classes=5, in_channels=4, hidden=8), (2, 5)),
        (Regression(3, in_channels=4, hidden=8), (2, 3)),
        (Regression(3, dense=True, in_channels=4, hidden=8), (2, 3, 6, 6)),
    ],
)
def test_built_in_heads_give_the_shape_of_their_task(task: Task, shape: tuple[int, ...]) -> None:
    prediction: Tensor = task(torch.rand(2, 4, 6, 6), {})
    assert tuple(prediction.shape) == shape


@pytest.mark.parametrize(
    "make",
    [lambda: Segmentation(num_classes=3), lambda: Classification(num_classes=3), lambda: Regression()],
)
def test_neither_head_nor_channels_is_an_error(make: Any) -> None:
    with pytest.raises(ConfigError, match="head=.*in_channels="):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classification(num_classes=1, head=nn.Identity()), "at least 2, got 1"),
        (lambda: cls(class_weights=[1.0, 2.0]), "2 class_weights for 3 classes"),
        (lambda: reg(criterion="l2"), "l1, mse, huber, got 'l2'"),
        (lambda: reg(size_like="seg"), "dense=True"),
        (lambda: seg(weight=-1.0), "weight"),
        (lambda: seg(mode="on"), "mode"),
    ],
)
def test_settings_that_can_not_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# --- metrics ----------------------------------------------------------------------------------------------


def test_segmentation_metrics_leave_out_ignored_pixels() -> None:
    task = seg()
    metrics = task.metrics()
    predicted = torch.tensor([[[0, 0, 1, 2]]])
    logits = nn.functional.one_hot(predicted, 3).permute(0, 3, 1, 2).float()
    task.update_metrics(metrics, logits, {"seg": torch.tensor([[[0, 1, 1, 255]]])})
    # class 0: 1 of 2, class 1: 1 of 2; class 2 occurs in no valid label
    assert metrics["pixel_accuracy"].compute().item() == pytest.approx(2 / 3)
    assert metrics["miou"].compute().item() == pytest.approx(1 / 2)


def test_classification_metric_adds_up_over_batches() -> None:
    task = cls()
    metrics = task.metrics()
    for labels in ([0, 1], [1, -100]):
        task.update_metrics(metrics, torch.eye(3)[:2], {"cls": torch.tensor(labels)})
    assert metrics["accuracy"].compute().item() == pytest.approx(2 / 3)


def test_regression_metric_leaves_out_what_does_not_count() -> None:
    task = reg()
    metrics = task.metrics()
    task.update_metrics(
        metrics, torch.tensor([[1.0], [5.0], [9.0]]), {"depth": torch.tensor([2.0, NAN, 6.0])}
    )
    assert metrics["mae"].compute().item() == pytest.approx(2.0)


def test_each_evaluation_has_its_own_metrics() -> None:
    task = cls()
    assert task.metrics()["accuracy"] is not task.metrics()["accuracy"]
