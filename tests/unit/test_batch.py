"""Reading, counting, splitting and moving batches."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mtaccum import BatchError, register_split, split_batch
from mtaccum.batch import batch_size_of, get_field, split_sizes, to_device


@dataclass
class Scene:
    image: Tensor
    boxes: list[Tensor]
    name: str = "train"


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


class Encoding(collections.UserDict):
    """As tokenizers of Hugging Face return: a UserDict with something beside the data."""

    def __init__(self, data: dict[str, Any], encodings: str = "fast") -> None:
        super().__init__(data)
        self.encodings = encodings


class Graph:
    """A batch of another library: knows itself how to be split and moved."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes
        self.moved_to: torch.device | None = None

    def __len__(self) -> int:
        return len(self.nodes)

    def to(self, device: torch.device) -> Graph:
        moved = Graph(self.nodes.to(device))
        moved.moved_to = device
        return moved


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "number", "sizes"),
    [
        (64, 5, [13, 13, 13, 13, 12]),
        (64, 4, [16, 16, 16, 16]),
        (7, 7, [1] * 7),
        (7, 1, [7]),
        (5, 3, [2, 2, 1]),
    ],
)
def test_split_sizes_differ_by_at_most_one(samples: int, number: int, sizes: list[int]) -> None:
    assert split_sizes(samples, number) == sizes


@pytest.mark.parametrize("number", [0, -1])
def test_no_micro_batches_are_refused(number: int) -> None:
    with pytest.raises(BatchError, match=f"into {number} micro-batches"):
        split_batch({"x": torch.zeros(3)}, number)


def test_more_micro_batches_than_samples_are_refused_with_both_numbers() -> None:
    with pytest.raises(BatchError, match="3 samples into 4 micro-batches.*at most 3"):
        split_batch({"x": torch.zeros(3, 1)}, 4)


IMAGES = torch.arange(5 * 2.0).reshape(5, 2)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (IMAGES, 5),
        ((IMAGES, torch.zeros(5)), 5),
        ({"scale": torch.tensor(2.0), "x": IMAGES}, 5),
        ([IMAGES, torch.zeros(5)], 5),
        ({"images": [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], "n": 1}, 2),
        ([{"x": torch.zeros(7)}, {"x": torch.zeros(7)}, {"x": torch.zeros(7)}], 3),
        (Scene(IMAGES, [IMAGES] * 5), 5),
        (Pair(IMAGES, torch.zeros(5)), 5),
        (Encoding({"ids": IMAGES}), 5),
        ({}, 0),
        ([], 0),
        ({"x": torch.zeros(0, 3)}, 0),
    ],
    ids=[
        "tensor",
        "tuple",
        "dict with a 0-d tensor first",
        "list of fields",
        "images of different sizes",
        "list of samples",
        "dataclass",
        "named tuple",
        "user dict",
        "no entries",
        "empty list",
        "no samples",
    ],
)
def test_number_of_samples(batch: Any, samples: int) -> None:
    assert batch_size_of(batch) == samples


@pytest.mark.parametrize("batch", [{"a": 3}, {"a": torch.tensor(1.0)}, 7])
def test_a_batch_that_does_not_tell_its_size_is_refused(batch: Any) -> None:
    with pytest.raises(BatchError, match="how many samples"):
        batch_size_of(batch)


# --- splitting --------------------------------------------------------------------------------------------


def test_tensors_are_split_into_views_and_lose_nothing() -> None:
    split = split_batch({"x": (x := torch.arange(64)), "scale": torch.tensor(2.0), "epoch": 3}, 5)
    assert [len(piece["x"]) for piece in split] == [13, 13, 13, 13, 12]
    assert torch.equal(torch.cat([piece["x"] for piece in split]), x)
    assert all(p["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in split)
    assert all(piece["scale"].item() == 2.0 and piece["epoch"] == 3 for piece in split)


def test_lists_of_detection_targets_are_split_by_sample() -> None:
    targets = [{"boxes": torch.full((n, 4), float(n))} for n in (2, 0, 5)]
    images = [torch.zeros(3, 8, 8 + n) for n in range(3)]

    first, second = split_batch({"images": images, "targets": targets}, 2)

    assert first["targets"] == targets[:2]
    assert second["targets"] == targets[2:]
    assert [image.shape[-1] for image in first["images"] + second["images"]] == [8, 9, 10]


def test_a_tuple_of_lists_is_a_tuple_of_fields() -> None:
    images, targets = [torch.zeros(3, 8, 8)] * 3, [{"boxes": torch.zeros(n, 4)} for n in (2, 5, 1)]
    first, second = split_batch((images, targets), 2)
    assert isinstance(first, tuple)
    assert [len(piece) for piece in (*first, *second)] == [2, 2, 1, 1]


def test_a_bare_tensor_is_split() -> None:
    first, second = split_batch(IMAGES, 2)
    assert torch.equal(first, IMAGES[:3])
    assert torch.equal(second, IMAGES[3:])


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, torch.arange(5)),
        [IMAGES, torch.arange(5)],
        Pair(IMAGES, torch.arange(5)),
        Scene(IMAGES, [IMAGES[i] for i in range(5)]),
        Encoding({"image": IMAGES, "label": torch.arange(5)}),
    ],
    ids=["tuple", "list of fields", "named tuple", "dataclass", "user dict"],
)
def test_micro_batches_have_the_type_of_the_batch(batch: Any) -> None:
    split = split_batch(batch, 2)
    assert [type(piece) for piece in split] == [type(batch)] * 2
    if isinstance(batch, Scene):
        assert [len(piece.boxes) for piece in split] == [3, 2]
        assert split[0].name == "train"
    elif isinstance(batch, Encoding):
        assert [len(piece["image"]) for piece in split] == [3, 2]
        assert split[1].encodings == "fast"
        assert len(batch["image"]) == 5, "the whole batch was changed"
    else:
        assert torch.equal(split[1][0], IMAGES[3:])


def test_a_list_of_samples_is_split_by_sample() -> None:
    samples = [{"x": torch.full((2,), float(i))} for i in range(3)]
    assert split_batch(samples, 2) == [samples[:2], samples[2:]]


def test_a_list_of_fields_in_a_dict_is_split_field_by_field() -> None:
    first, second = split_batch({"x": torch.zeros(4, 2), "levels": [torch.zeros(4, 1), torch.ones(4, 3)]}, 2)
    assert [tuple(level.shape) for level in first["levels"]] == [(2, 1), (2, 3)]
    assert second["levels"][1].sum() == 6


def test_a_list_as_long_as_the_batch_holds_samples() -> None:
    """Also where its tensors are as long by chance: two images with two boxes each."""
    boxes = [torch.zeros(2, 4), torch.ones(2, 4)]
    first, second = split_batch({"image": torch.zeros(2, 3), "boxes": boxes}, 2)
    assert [piece["boxes"] for piece in (first, second)] == [[boxes[0]], [boxes[1]]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (torch.zeros(3, 2), r"Tensor\(3, 2\).*4 samples.*first dimension is 3"),
        ([1, 2, 3], "list of 3 entries.*4 samples"),
        ([], "list of 0 entries.*4 samples"),
    ],
)
def test_an_entry_of_another_length_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split_batch({"x": torch.zeros(4, 2), "entry": entry}, 2)


def test_a_type_made_known_splits_itself() -> None:
    register_split(Graph, lambda graph, sizes: [Graph(piece) for piece in graph.nodes.split(sizes)])
    split = split_batch(Graph(torch.arange(7).reshape(7, 1)), 3)
    assert [len(piece) for piece in split] == [3, 2, 2]


# --- entries ----------------------------------------------------------------------------------------------


def test_entries_by_key_index_and_attribute() -> None:
    assert get_field({"x": 1}, "x") == 1
    assert get_field((5, 6), 1) == 6
    assert get_field(Scene(IMAGES, []), "image") is IMAGES
    assert get_field({"x": 1}, "y", None) is None
    assert get_field((5,), 3, "default") == "default"
    assert get_field(Encoding({"ids": 3}), "ids") == 3


@pytest.mark.parametrize(("batch", "key"), [({"x": 1}, "y"), ((1, 2), 5), (Scene(IMAGES, []), "depth")])
def test_a_missing_entry_is_named_with_what_there_is(batch: Any, key: str | int) -> None:
    with pytest.raises(BatchError, match=f"no entry {key!r}"):
        get_field(batch, key)


# --- devices ----------------------------------------------------------------------------------------------


def test_a_batch_that_is_there_already_is_the_very_same_object() -> None:
    batch = {"x": torch.zeros(2), "list": [torch.zeros(3)]}
    assert to_device(batch, torch.device("cpu")) is batch


def test_all_tensors_of_a_nest_are_moved_and_the_batch_is_left_alone() -> None:
    batch = {"x": torch.zeros(2), "list": [torch.zeros(3), "name"], "scene": Scene(IMAGES, [IMAGES])}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["list"][0].is_meta
    assert moved["list"][1] == "name"
    assert moved["scene"].boxes[0].is_meta
    assert not batch["x"].is_meta


def test_an_object_moves_itself() -> None:
    assert to_device(Graph(IMAGES), torch.device("meta")).nodes.is_meta


def test_an_object_inside_a_batch_moves_itself_too() -> None:
    batch = {"graph": Graph(IMAGES), "y": torch.zeros(5)}
    assert to_device(batch, torch.device("meta"))["graph"].nodes.is_meta


def test_what_can_not_be_moved_passes_through() -> None:
    assert to_device(7, torch.device("meta")) == 7
