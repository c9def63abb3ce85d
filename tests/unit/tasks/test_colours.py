"""Colours of classes and of numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtaccum.tasks.colours import NO_LABEL, class_colours, paint_classes, paint_values

LOWEST, HIGHEST = "440154", "fde725"  # the ends of viridis
GREY = "808080"


def colours_of(picture: Tensor) -> list[str]:
    """The pixels of RGB (1, 3, height, width) from left to right and top to bottom, in hexadecimal."""
    pixels = (picture[0].flatten(1).T * 255).round().to(torch.uint8)
    return [bytes(pixel.tolist()).hex() for pixel in pixels]


def test_the_first_classes_have_the_colours_of_okabe_and_ito() -> None:
    picture = paint_classes(torch.tensor([[[0, 1], [2, 7]]]))
    assert picture.shape == (1, 3, 2, 2)
    assert colours_of(picture) == ["000000", "e69f00", "56b4e9", "cc79a7"]


@pytest.mark.parametrize(("count", "distance"), [(8, 0.25), (21, 0.2), (150, 0.08), (512, 0.06)])
def test_the_colours_of_classes_differ_from_each_other_and_from_grey(count: int, distance: float) -> None:
    colours = torch.cat([class_colours(count), torch.full((1, 3), NO_LABEL)])
    assert colours.shape == (count + 1, 3)
    assert ((colours >= 0) & (colours <= 1)).all()
    assert (torch.cdist(colours, colours) + 9 * torch.eye(count + 1)).min() > distance


def test_a_class_has_its_colour_whatever_the_number_of_classes() -> None:
    assert torch.equal(class_colours(40)[:11], class_colours(11))
    one, more = paint_classes(torch.tensor([[[9]]])), paint_classes(torch.tensor([[[9, 30]]]))
    assert colours_of(one) == colours_of(more)[:1]


def test_any_number_of_classes_can_be_painted() -> None:
    picture = paint_classes(torch.tensor([[[5000, 5000 % 512]]]))
    assert colours_of(picture)[0] == colours_of(picture)[1]


def test_pixels_that_are_not_valid_are_grey_whatever_they_hold() -> None:
    valid = torch.tensor([[[True, False, False]]])
    assert colours_of(paint_classes(torch.tensor([[[0, -100, 10**12]]]), valid)) == ["000000", GREY, GREY]


def limits(*values: float) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1)


def test_numbers_go_from_the_dark_to_the_light_end_of_the_scale_and_stay_on_it() -> None:
    values = torch.tensor([[[1.0, 3.0, 0.0, 9.0, float("inf")]]])
    found = colours_of(paint_values(values, limits(1.0), limits(3.0)))
    assert found == [LOWEST, HIGHEST, LOWEST, HIGHEST, HIGHEST]
    middle = paint_values(torch.tensor([[[2.0]]]), limits(1.0), limits(3.0)).flatten()
    assert middle.tolist() == pytest.approx([0x21 / 255, 0x91 / 255, 0x8C / 255], abs=0.01)


def test_each_sample_has_its_own_limits() -> None:
    values = torch.tensor([[[5.0]], [[5.0]]])
    picture = paint_values(values, limits(0.0, 5.0), limits(5.0, 10.0))
    assert colours_of(picture[:1]) + colours_of(picture[1:]) == [HIGHEST, LOWEST]


def test_nan_is_grey_and_so_is_what_is_not_valid() -> None:
    values = torch.tensor([[[0.0, float("nan"), 1.0]]])
    assert colours_of(paint_values(values, limits(0.0), limits(1.0))) == [LOWEST, GREY, HIGHEST]
    valid = torch.tensor([[[True, True, False]]])
    assert colours_of(paint_values(values, limits(0.0), limits(1.0), valid)) == [LOWEST, GREY, GREY]


def test_limits_that_are_equal_or_missing_are_no_error() -> None:
    values = torch.tensor([[[2.0, 2.0]]])
    assert colours_of(paint_values(values, limits(2.0), limits(2.0))) == [LOWEST, LOWEST]
    infinite = torch.tensor([[[float("nan"), float("inf")]]])
    assert colours_of(paint_values(infinite, limits(float("inf")), limits(-float("inf")))) == [GREY, LOWEST]
