"""Random streams: all of them are kept, restored, and written into checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mtaccum.state import RandomState, random_state_kept

GENERATOR = torch.Generator().manual_seed(3)
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": np.random.rand,
    "numpy, the second of a pair": np.random.randn,
    "python": random.random,
    "python, the second of a pair": lambda: random.gauss(0, 1),
    "a generator": lambda: torch.rand(1, generator=GENERATOR).item(),
}
streams = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@streams
def test_a_stream_goes_on_from_where_it_was(draw: Callable[[], object]) -> None:
    draw()
    before = RandomState([GENERATOR])
    expected = [draw(), draw()]
    assert not before.is_current()
    before.restore()
    assert before.is_current()
    assert [draw(), draw()] == expected


@streams
def test_a_stream_goes_on_from_a_file(draw: Callable[[], object], tmp_path: Path) -> None:
    draw()
    torch.save(RandomState([GENERATOR]).state_dict(), tmp_path / "state.pt")
    expected = [draw(), draw()]
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    GENERATOR.manual_seed(9)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    RandomState.of_state_dict(saved, [GENERATOR]).restore()
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_what_is_drawn_inside_is_as_if_it_had_not_been(name: str) -> None:
    def drawing() -> None:
        with random_state_kept():
            DRAWS[name]()
            raise RuntimeError("broken")

    before = RandomState()
    with pytest.raises(RuntimeError, match="broken"):
        drawing()
    assert before.is_current()
