"""A plain five-head script adopts ``split_backward`` in at most ten changed lines, and trains the same."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
BEFORE, AFTER = HERE / "five_heads_before.py", HERE / "five_heads_after.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_at_most_ten_lines_change() -> None:
    diff = list(difflib.ndiff(BEFORE.read_text().splitlines(), AFTER.read_text().splitlines()))
    added = [line for line in diff if line.startswith("+ ") and line[2:].strip()]
    removed = [line for line in diff if line.startswith("- ") and line[2:].strip()]

    assert "split_backward" in "".join(added)
    assert len(added) <= 10
    assert len(removed) <= 10


def test_the_weights_after_training_are_the_same() -> None:
    """In double: the schedules differ by rounding only, which Adam may magnify in single precision."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        before, after = load(BEFORE).main(), load(AFTER).main()
    finally:
        torch.set_default_dtype(default)
    for (name, expected), (_, found) in zip(
        before.state_dict().items(), after.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
