"""How the built-in tasks draw themselves: which colour is where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtaccum import Classification, Regression, Segmentation, Task

NAN = float("nan")
BLACK, ORANGE, BLUE, GREY = "000000", "e69f00", "56b4e9", "808080"
LOWEST, HIGHEST = "440154", "fde725"


def colours_of(pictures: Tensor, sample: int = 0) -> list[str]:
    """The pixels of one of RGB (batch, 3, height, width), row by row, in hexadecimal."""
    pixels = (pictures[sample].flatten(1).T * 255).round().to(torch.uint8)
    return [bytes(pixel.tolist()).hex() for pixel in pixels]


def logits_of(classes: Tensor, num_classes: int) -> Tensor:
    return nn.functional.one_hot(classes, num_classes).movedim(-1, 1).float()


def seg(**settings: Any) -> Segmentation:
    return Segmentation(num_classes=3, head=nn.Identity(), **settings)


def depth(**settings: Any) -> Regression:
    return Regression(dense=True, head=nn.Identity(), **settings)


def drawn(task: Task, prediction: Any, batch: Any) -> tuple[Tensor, Tensor]:
    pictures = task.draw(prediction, batch)
    assert pictures is not None
    for picture in pictures:
        assert picture.shape[1] == 3
        assert ((picture >= 0) & (picture <= 1)).all()
    return pictures


def test_a_task_is_not_drawn_unless_it_says_how() -> None:
    assert Task(nn.Identity(), "y").draw(torch.zeros(1, 3, 2, 2), {"y": torch.zeros(1, 2, 2)}) is None
    assert Classification(3, head=nn.Identity()).draw(torch.zeros(1, 3), {"cls": torch.zeros(1)}) is None


# --- segmentation -----------------------------------------------------------------------------------------


def test_segmentation_shows_the_likeliest_class_and_the_label_in_the_same_colours() -> None:
    classes = torch.tensor([[[0, 1], [2, 1]], [[2, 2], [0, 0]]])
    prediction, label = drawn(seg(), logits_of(classes, 3), {"seg": classes.flip(0)})
    assert colours_of(prediction) == [BLACK, ORANGE, BLUE, ORANGE]
    assert colours_of(label) == [BLUE, BLUE, BLACK, BLACK]
    assert colours_of(label, sample=1) == colours_of(prediction)


@pytest.mark.parametrize(("ignored", "dtype"), [(255, torch.uint8), (255, torch.int64), (-1, torch.int64)])
def test_ignored_label_pixels_are_grey_and_predictions_are_shown_there(
    ignored: int, dtype: torch.dtype
) -> None:
    labels = torch.tensor([[[1, ignored]]]).to(dtype)
    prediction, label = drawn(
        seg(ignore_index=ignored), logits_of(torch.tensor([[[1, 2]]]), 3), {"seg": labels}
    )
    assert colours_of(prediction) == [ORANGE, BLUE]
    assert colours_of(label) == [ORANGE, GREY]


def test_a_class_may_be_the_ignored_one() -> None:
    prediction, label = drawn(
        seg(ignore_index=0), logits_of(torch.tensor([[[0, 1]]]), 3), {"seg": torch.tensor([[[0, 1]]])}
    )
    assert colours_of(prediction) == [BLACK, ORANGE]
    assert colours_of(label) == [GREY, ORANGE]


def test_prediction_and_label_may_differ_in_resolution() -> None:
    prediction, label = drawn(
        seg(), torch.zeros(1, 3, 2, 4), {"seg": torch.zeros(1, 8, 16, dtype=torch.long)}
    )
    assert prediction.shape == (1, 3, 2, 4)
    assert label.shape == (1, 3, 8, 16)


@pytest.mark.parametrize("batch", [{}, {"seg": None}])
def test_without_a_target_segmentation_is_not_drawn(batch: Any) -> None:
    assert seg().draw(torch.zeros(1, 3, 2, 2), batch) is None


@pytest.mark.parametrize("prediction", [torch.zeros(1, 3, 5), torch.zeros(1, 3, 2, 2, 2), {"out": 1}])
def test_what_is_no_plane_of_pixels_is_not_drawn(prediction: Any) -> None:
    batch = {"seg": torch.zeros(1, 2, 2, dtype=torch.long), "depth": torch.zeros(1, 1, 2, 2, 2)}
    assert seg().draw(prediction, batch) is None
    assert depth().draw(prediction, batch) is None


@pytest.mark.parametrize("labels", [torch.zeros(1, 1, 2, 2, dtype=torch.long), torch.zeros(1, 2, 2)])
def test_labels_that_are_no_plane_of_classes_are_not_drawn(labels: torch.Tensor) -> None:
    assert seg().draw(torch.zeros(1, 3, 2, 2), {"seg": labels}) is None


# --- regression -------------------------------------------------------------------------------------------


def test_prediction_and_label_share_the_scale_that_the_labels_span() -> None:
    target = torch.tensor([[[[2.0, 4.0]]], [[[0.0, 40.0]]]])
    prediction, label = drawn(depth(), torch.tensor([[[[9.0, 2.0]]], [[[20.0, -9.0]]]]), {"depth": target})
    assert colours_of(label) == colours_of(label, sample=1) == [LOWEST, HIGHEST]
    assert colours_of(prediction) == [HIGHEST, LOWEST]
    assert colours_of(prediction, sample=1)[1] == LOWEST
    assert colours_of(prediction, sample=1)[0] not in (LOWEST, HIGHEST)


def test_the_first_channel_is_drawn() -> None:
    target = torch.stack([torch.tensor([[0.0, 1.0]]), torch.tensor([[70.0, -70.0]])]).unsqueeze(0)
    prediction, label = drawn(depth(out_channels=2), target, {"depth": target})
    assert colours_of(label) == colours_of(prediction) == [LOWEST, HIGHEST]


def test_a_target_without_channels_is_drawn() -> None:
    target = torch.tensor([[[0, 1]]])
    _, label = drawn(depth(), torch.zeros(1, 1, 1, 2), {"depth": target})
    assert colours_of(label) == [LOWEST, HIGHEST]


@pytest.mark.parametrize("with_channels", [True, False])
def test_labels_that_do_not_count_are_grey_and_do_not_stretch_the_scale(with_channels: bool) -> None:
    target = torch.tensor([[[[0.0, 1.0, NAN, 1000.0]]]])
    mask = torch.tensor([[[True, True, True, False]]])
    batch = {"depth": target, "known": mask.unsqueeze(1) if with_channels else mask}
    prediction, label = drawn(depth(mask="known"), torch.tensor([[[[1.0, 0.0, 1.0, 0.0]]]]), batch)
    assert colours_of(label) == [LOWEST, HIGHEST, GREY, GREY]
    assert colours_of(prediction) == [HIGHEST, LOWEST, HIGHEST, LOWEST]


def test_one_mask_for_all_channels_is_drawn() -> None:
    batch = {
        "depth": torch.tensor([[[[0.0, 1.0]], [[5.0, 5.0]]]]),
        "known": torch.tensor([[[[True, False]]]]),
    }
    _, label = drawn(depth(out_channels=2, mask="known"), torch.rand(1, 2, 1, 2), batch)
    assert colours_of(label)[1] == GREY


def test_a_sample_without_any_label_shows_its_prediction_on_a_scale_of_its_own() -> None:
    target = torch.tensor([[[[NAN, NAN]]], [[[0.0, 1.0]]]])
    prediction, label = drawn(depth(), torch.tensor([[[[7.0, 5.0]]], [[[0.0, 1.0]]]]), {"depth": target})
    assert colours_of(label) == [GREY, GREY]
    assert colours_of(prediction) == [HIGHEST, LOWEST]
    assert colours_of(label, sample=1) == [LOWEST, HIGHEST]


@pytest.mark.parametrize(
    ("label", "at"), [(1.0, [LOWEST, HIGHEST, LOWEST]), (3.0, [LOWEST, HIGHEST, HIGHEST])]
)
def test_labels_that_are_all_the_same_share_the_scale_of_the_prediction(label: float, at: list[str]) -> None:
    batch = {"depth": torch.full((1, 1, 1, 2), label)}
    prediction, labels = drawn(depth(), torch.tensor([[[[1.0, 3.0]]]]), batch)
    assert colours_of(prediction) + colours_of(labels)[:1] == at


def test_predictions_that_are_not_finite_are_drawn_all_the_same() -> None:
    prediction, label = drawn(
        depth(), torch.tensor([[[[NAN, float("inf")]]]]), {"depth": torch.tensor([[[[0.0, float("inf")]]]])}
    )
    assert colours_of(prediction) == [GREY, HIGHEST]
    assert colours_of(label) == [LOWEST, HIGHEST]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_predictions_of_any_precision_are_drawn(dtype: torch.dtype) -> None:
    target = torch.tensor([[[[0.0, 1.0]]]])
    prediction, _ = drawn(depth(), target.to(dtype), {"depth": target})
    assert colours_of(prediction) == [LOWEST, HIGHEST]
    prediction, _ = drawn(
        seg(), logits_of(torch.tensor([[[2]]]), 3).to(dtype), {"seg": torch.tensor([[[2]]])}
    )
    assert colours_of(prediction) == [BLUE]


def test_a_number_for_each_sample_is_not_drawn_nor_is_a_missing_target() -> None:
    for shape in [(2, 1), (2, 1, 2, 2)]:
        assert Regression(head=nn.Identity()).draw(torch.zeros(shape), {"depth": torch.zeros(shape)}) is None
    assert depth().draw(torch.zeros(1, 1, 2, 2), {}) is None
