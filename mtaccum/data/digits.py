"""Synthetic multi-task scenes made of real handwritten digits.

A scene shows one large digit in front and up to two small digits behind it, and carries the labels
of four tasks: semantic segmentation, classification of the large digit, counting and depth. The
handwriting ships with the package (see ``digits.LICENSE.md``), so nothing is downloaded.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mtaccum.errors import ConfigError, unknown_name

IMAGE_SIZE = 32
"""Height and width of a scene in pixels."""
NUM_SEG_CLASSES = 11
"""Segmentation classes: 0 is the background, ``1 + k`` is digit ``k``."""
NUM_CLASSES = 10
"""Classes of the large digit, 0 to 9."""
MAX_DIGITS = 3
"""Most digits in one scene."""
MIN_VISIBLE = 0.75
"""Least fraction of a small digit's pixels that nearer digits leave uncovered."""
SPLITS = ("train", "val")

_DATA_FILE = Path(__file__).with_name("digits.npz")
_LARGE_HEIGHTS = (20, 24)
_SMALL_HEIGHTS = (12, 15)
# A glyph of this height would stand at the background, whose depth is 1.
_REFERENCE_HEIGHT = 8.0
# Just below 0.5, a grey value of the source: rounding on another CPU must not flip a label.
_MASK_OPACITY = 0.499
_MAX_PLACEMENT_TRIES = 40
_NOISE_STD = 0.03

FloatArray = npt.NDArray[np.float32]


class _Scene(NamedTuple):
    """Compact form of one scene, in the form in which it is cached."""

    image: npt.NDArray[np.uint8]
    seg: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.float16]
    cls: int
    number: int


class DigitScenes(Dataset[dict[str, Tensor]]):
    """Scenes of one large and up to two small handwritten digits, with labels for four tasks.

    Scene ``i`` depends only on ``(split, seed, i)``, not on ``size``, the process, the number of
    workers or the order of access. The splits draw from disjoint sets of glyphs (1400 for
    ``train``, 397 for ``val``): no glyph of one occurs in the other. The source doesn't tell the
    writers apart, so both splits may hold different glyphs by the same person.

    An item is a dictionary of CPU tensors:

    - ``image``: float32, ``(1, 32, 32)``, grey values in [0, 1];
    - ``seg``: int64, ``(32, 32)``, 0 for background and ``1 + k`` for a pixel of digit ``k``;
    - ``cls``: int64, ``()``, the large digit, 0 to 9;
    - ``number``: int64, ``()``, how many digits the scene shows, 1 to 3;
    - ``depth``: float32, ``(1, 32, 32)``, distance from the camera as a fraction of the distance to
      the background, so the background is 1.0. All digits have the same physical height, hence a
      digit ``h`` pixels high is at depth ``8 / h`` (pinhole camera): 0.33 to 0.40 for a large
      digit, 0.53 to 0.67 for a small one.

    Farther digits are hidden by nearer ones and fade with distance. At least ``MIN_VISIBLE`` of the
    pixels of every small digit stay visible.

    Args:
        split: ``"train"`` or ``"val"``.
        size: number of scenes, at least 1.
        seed: non-negative seed of the scenes.
        cache: keep scenes, about 4 KiB each, in memory once they were made.

    Raises:
        ConfigError: if ``split``, ``size`` or ``seed`` isn't valid.
    """

    def __init__(self, split: str = "train", size: int = 4096, seed: int = 0, *, cache: bool = True) -> None:
        if split not in SPLITS:
            raise ConfigError(unknown_name("split", split, SPLITS))
        for name, value, least in (("size", size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
        self.split = split
        self.size = size
        self.seed = seed
        self._cache: dict[int, _Scene] | None = {} if cache else None
        images, labels, val = _load_glyphs()
        self.glyph_ids = np.flatnonzero(val if split == "val" else ~val)
        self._glyphs = images[self.glyph_ids]
        self._labels = labels[self.glyph_ids]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return scene ``index``; a negative index counts from the end.

        Raises:
            IndexError: if the index is outside ``[-len(self), len(self))``.
        """
        if not -self.size <= index < self.size:
            raise IndexError(f"index {index} is out of range for {self.size} scenes")
        index = int(index) % self.size
        scene = None if self._cache is None else self._cache.get(index)
        if scene is None:
            scene = self._render(index)
            if self._cache is not None:
                self._cache[index] = scene
        return {
            "image": torch.from_numpy(scene.image).to(torch.float32).div_(255.0).unsqueeze(0),
            "seg": torch.from_numpy(scene.seg).to(torch.int64),
            "cls": torch.tensor(scene.cls),
            "number": torch.tensor(scene.number),
            "depth": torch.from_numpy(scene.depth).to(torch.float32).unsqueeze(0),
        }

    def __getstate__(self) -> dict[str, Any]:
        # Workers started by "spawn" get a pickled copy; scenes are cheaper to make than to send.
        state = self.__dict__.copy()
        state["_cache"] = None if self._cache is None else {}
        return state

    def _render(self, index: int) -> _Scene:
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        count = int(rng.integers(1, MAX_DIGITS + 1))
        glyphs = rng.integers(len(self._glyphs), size=count)
        small = rng.integers(_SMALL_HEIGHTS[0], _SMALL_HEIGHTS[1] + 1, size=count - 1)
        heights = [int(rng.integers(_LARGE_HEIGHTS[0], _LARGE_HEIGHTS[1] + 1))]
        heights += sorted(small.tolist(), reverse=True)

        shape = (IMAGE_SIZE, IMAGE_SIZE)
        seg = np.zeros(shape, np.uint8)
        depth = np.ones(shape, np.float16)
        light = np.zeros(shape, np.float32)
        clear = np.ones(shape, np.float32)
        number = 0
        # From front to back, so that what is already drawn hides what comes next.
        for glyph, height in zip(glyphs.tolist(), heights, strict=True):
            width = height - int(rng.integers(0, 1 + height // 6))
            alpha = _resize(self._glyphs[glyph], height, width)
            mask = alpha > _MASK_OPACITY
            window = _place(rng, mask, seg)
            if window is None:
                continue
            distance = _REFERENCE_HEIGHT / height
            # Haze: what is farther is darker, down to nothing at the background.
            brightness = 1.4 * (1.0 - distance) + rng.uniform(-0.08, 0.08)
            visible = mask & (seg[window] == 0)
            seg[window][visible] = 1 + self._labels[glyph]
            depth[window][visible] = distance
            light[window] += clear[window] * alpha * np.float32(brightness)
            clear[window] *= 1.0 - alpha
            number += 1
        light += clear * np.float32(rng.uniform(0.0, 0.1))
        light += rng.standard_normal(shape, dtype=np.float32) * np.float32(_NOISE_STD)
        image = (light.clip(0.0, 1.0) * 255.0).round().astype(np.uint8)
        return _Scene(image, seg, depth, int(self._labels[glyphs[0]]), number)


def _place(
    rng: np.random.Generator, mask: npt.NDArray[np.bool_], seg: npt.NDArray[np.uint8]
) -> tuple[slice, slice] | None:
    """Draw a window of ``seg`` in which enough of ``mask`` stays visible.

    Returns ``None`` if no draw fits, which is rare and leaves the digit out of the scene.
    """
    height, width = mask.shape
    total = int(mask.sum())
    tops = rng.integers(0, seg.shape[0] - height + 1, size=_MAX_PLACEMENT_TRIES)
    lefts = rng.integers(0, seg.shape[1] - width + 1, size=_MAX_PLACEMENT_TRIES)
    for top, left in zip(tops.tolist(), lefts.tolist(), strict=True):
        window = (slice(top, top + height), slice(left, left + width))
        if np.count_nonzero(mask & (seg[window] == 0)) >= MIN_VISIBLE * total:
            return window
    return None


def _resize(glyph: FloatArray, height: int, width: int) -> FloatArray:
    """Resize a glyph ``(8, 8)`` bilinearly to ``(height, width)``."""
    resized = _interpolation(height) @ glyph @ _interpolation(width).T
    return resized.astype(np.float32, copy=False)


@cache
def _interpolation(length: int) -> FloatArray:
    """Matrix ``(length, 8)`` of bilinear weights, sample positions at pixel centres."""
    source = (np.arange(length) + 0.5) * 8 / length - 0.5
    distance = np.abs(source.clip(0, 7)[:, None] - np.arange(8))
    return (1.0 - distance).clip(0.0, None).astype(np.float32)


@cache
def _load_glyphs() -> tuple[FloatArray, npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Glyphs ``(1797, 8, 8)`` as opacity in [0, 1], labels ``(1797,)``, mask of the val split."""
    with np.load(_DATA_FILE) as data:
        return (data["images"] / np.float32(16)).astype(np.float32), data["labels"], data["val"]
