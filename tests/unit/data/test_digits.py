"""The digit scenes: reproducible, honest about their splits, and labelled consistently."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import mtaccum.data.digits as digits
from mtaccum.data.digits import DigitScenes
from mtaccum.errors import ConfigError

Scene = dict[str, Tensor]


def assert_same(first: Scene, second: Scene) -> None:
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    dataset = DigitScenes("train", size=300)
    return [dataset[index] for index in range(300)]


def objects_by_depth(scene: Scene) -> list[tuple[float, Tensor]]:
    """Each distinct depth nearer than the background, and its mask."""
    depth = scene["depth"][0]
    return [(d, depth == d) for d in sorted(set(depth.flatten().tolist())) if d < 1.0]


def test_item_has_documented_shapes_types_and_ranges(scenes: list[Scene]) -> None:
    shapes = {"image": (1, 32, 32), "seg": (32, 32), "cls": (), "number": (), "depth": (1, 32, 32)}
    for scene in scenes:
        assert {key: tuple(value.shape) for key, value in scene.items()} == shapes
        for key, value in scene.items():
            expected = torch.float32 if key in ("image", "depth") else torch.int64
            assert value.dtype == expected, key
        assert scene["image"].min() >= 0.0
        assert scene["image"].max() <= 1.0
        assert scene["seg"].min() >= 0
        assert scene["seg"].max() < digits.NUM_SEG_CLASSES
        assert 0 <= scene["cls"] < digits.NUM_CLASSES
        assert 1 <= scene["number"] <= digits.MAX_DIGITS
        assert scene["depth"].min() > 0.0
        assert scene["depth"].max() == 1.0


def test_every_label_occurs_about_equally_often(scenes: list[Scene]) -> None:
    classes = torch.bincount(torch.stack([s["cls"] for s in scenes]), minlength=10)
    numbers = torch.bincount(torch.stack([s["number"] for s in scenes]), minlength=4)
    assert classes.min() > 10
    assert numbers[0] == 0
    assert numbers[1:].min() > 60


def test_segmentation_and_depth_agree_with_class_and_number(scenes: list[Scene]) -> None:
    for scene in scenes:
        seg, number = scene["seg"], int(scene["number"])
        foreground = scene["depth"][0] < 1.0
        assert torch.equal(foreground, seg > 0)
        _, mask = objects_by_depth(scene)[0]
        assert (seg[mask] == scene["cls"] + 1).all(), "the nearest digit is the large one"
        # Digits of the same size share a depth and digits of the same class share a segment, so
        # the number of different (class, depth) pairs is a lower bound.
        pairs = {(c, d) for d, m in objects_by_depth(scene) for c in seg[m].tolist()}
        assert 1 <= len(pairs) <= number
        if number == 1:
            assert len(pairs) == 1


def test_most_scenes_show_as_many_objects_as_they_count(scenes: list[Scene]) -> None:
    exact = 0
    for scene in scenes:
        objects = objects_by_depth(scene)
        pairs = {(c, d) for d, mask in objects for c in scene["seg"][mask].tolist()}
        exact += len(pairs) == scene["number"].item()
    assert exact > 0.95 * len(scenes)


def test_large_digit_is_nearer_and_taller(scenes: list[Scene]) -> None:
    for scene in scenes:
        (nearest, large), *others = objects_by_depth(scene)
        rows = int(large.any(dim=1).sum())
        # The glyph may leave a margin within its box, but never exceeds it.
        assert 0.6 * 8 / nearest <= rows <= 8 / nearest + 0.1
        for distance, small in others:
            assert distance >= 1.2 * nearest
            # Up to two digits may share this depth, so look at the pixels and not at the extent.
            assert int(small.sum()) < 2 * int(large.sum())


@pytest.mark.parametrize("split", digits.SPLITS)
def test_small_digits_stay_visible(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = digits._place
    fractions: list[float] = []

    def watched(rng: np.random.Generator, mask: np.ndarray, seg: np.ndarray) -> object:
        window = place(rng, mask, seg)
        if window is not None:
            fractions.append(float((mask & (seg[window] == 0)).sum() / mask.sum()))
        return window

    monkeypatch.setattr(digits, "_place", watched)
    dataset = DigitScenes(split, size=200)
    numbers = [int(dataset[index]["number"]) for index in range(200)]
    assert len(fractions) == sum(numbers), "every placed digit counts, and no other"
    assert min(fractions) >= digits.MIN_VISIBLE
    assert min(fractions) < 0.95, "some digits are partly hidden"


def test_digit_that_fits_nowhere_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    place = digits._place

    def place_first(rng: np.random.Generator, mask: np.ndarray, seg: np.ndarray) -> object:
        return None if seg.any() else place(rng, mask, seg)

    monkeypatch.setattr(digits, "_place", place_first)
    dataset = DigitScenes("train", size=20)
    for index in range(20):
        scene = dataset[index]
        assert scene["number"] == 1
        assert len(objects_by_depth(scene)) == 1


def test_scene_depends_on_split_seed_and_index_only() -> None:
    forward, backward = DigitScenes(size=20), DigitScenes(size=50, cache=False)
    reverse = {index: backward[index] for index in reversed(range(20))}
    for index in range(20):
        assert_same(forward[index], reverse[index])
        assert_same(forward[index], forward[index])
    for other in (DigitScenes(seed=1), DigitScenes("val")):
        assert not torch.equal(other[0]["image"], forward[0]["image"])
    assert not torch.equal(forward[0]["image"], forward[1]["image"])


def test_changing_an_item_does_not_change_the_data_set() -> None:
    dataset = DigitScenes(size=2)
    before = {key: value.clone() for key, value in dataset[0].items()}
    for value in dataset[0].values():
        value.zero_()
    assert_same(before, dataset[0])


def test_workers_and_pickling_do_not_change_the_scenes() -> None:
    dataset = DigitScenes(size=24)
    alone = list(DataLoader(dataset, batch_size=8))
    assert len(pickle.dumps(dataset)) < 500_000, "cached scenes are not sent to workers"
    for other in (dataset, pickle.loads(pickle.dumps(dataset))):
        shared = list(DataLoader(other, batch_size=8, num_workers=2))
        for first, second in zip(alone, shared, strict=True):
            assert_same(first, second)


def test_splits_share_no_handwriting() -> None:
    train, val = DigitScenes("train"), DigitScenes("val")
    assert (len(train.glyph_ids), len(val.glyph_ids)) == (1400, 397)
    assert not set(train.glyph_ids) & set(val.glyph_ids)
    pixels = [{glyph.tobytes() for glyph in d._glyphs} for d in (train, val)]
    assert not pixels[0] & pixels[1], "no glyph occurs twice in the source either"
    counts = [np.bincount(d._labels, minlength=10) for d in (train, val)]
    assert counts[1].min() >= 39
    assert counts[1].max() <= 40


def test_indexing_follows_sequences() -> None:
    dataset = DigitScenes(size=5)
    assert len(dataset) == 5
    # Iteration without __iter__ ends at the first IndexError.
    assert len(list(dataset)) == 5  # type: ignore[call-overload]
    assert_same(dataset[-1], dataset[4])
    for index in (5, -6):
        with pytest.raises(IndexError, match="5 scenes"):
            dataset[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "train, val"),
        ({"split": "vall"}, "Did you mean 'val'"),
        ({"size": 0}, "size must be an integer >= 1"),
        ({"size": 2.5}, "size must be an integer >= 1"),
        ({"seed": -1}, "seed must be an integer >= 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DigitScenes(**arguments)  # type: ignore[arg-type]


def test_licence_lies_beside_the_data() -> None:
    text = Path(digits.__file__).with_name("digits.LICENSE.md").read_text(encoding="utf-8")
    for part in ("10.24432/C50P49", "CC BY 4.0", "Alpaydin", "Kaynak", "What was changed"):
        assert part in text
