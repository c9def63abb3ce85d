"""The peaks that the README promises, on the benchmark's model at its real size; bytes are exact."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtaccum.memory import measure_peak

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cases import dense_case

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def peak() -> Callable[[str, int], int]:
    """Activation peak in bytes of one pass by a schedule, with so many heads, each measured once."""
    known: dict[tuple[str, int], int] = {}

    def measure(schedule: str, heads: int) -> int:
        if (schedule, heads) not in known:
            case = dense_case(heads, "cpu")
            case.make_gradients()
            gc.collect()
            existing = [case.model, *case.batch.values()]
            known[schedule, heads] = measure_peak(
                lambda: case.run(schedule), existing=existing
            ).activation_bytes
        return known[schedule, heads]

    measure("split", 1)  # the first pass under the tracker leaves garbage of PyTorch's own imports
    known.clear()
    return measure


def test_sixteen_heads_need_no_more_than_one_under_sequential(peak: Callable[[str, int], int]) -> None:
    """But for what makes repeats exact: the trunk's buffers as they were, and copies for the repeat."""
    trunk = dense_case(1, "cpu").model.trunk
    assert trunk is not None
    buffers = sum(buffer.nbytes for buffer in trunk.buffers())
    losses = 16 * 8  # the report's sum in double, one for each task
    assert peak("sequential", 16) <= peak("sequential", 1) + 2 * buffers + losses
    assert peak("sequential", 16) / peak("sequential", 1) < 1.0005


def test_sixteen_heads_need_one_gradient_at_the_cut_more_than_one_under_split(
    peak: Callable[[str, int], int],
) -> None:
    cut = 8 * 128 * 32 * 32 * 4  # (batch, channels, height, width) in single precision
    assert peak("split", 16) <= peak("split", 1) + cut + 16 * 8
    assert peak("split", 16) / peak("split", 1) <= 1.03


def test_eight_heads_need_half_and_sixteen_a_third_under_split(peak: Callable[[str, int], int]) -> None:
    assert peak("split", 8) / peak("summed", 8) <= 0.50
    assert peak("split", 16) / peak("summed", 16) <= 1 / 3
