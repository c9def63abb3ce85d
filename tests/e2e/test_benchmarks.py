"""The benchmarks as a user runs them: memory ratios that hold anywhere, and complete reports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
RECOMPUTED = "split, trunk recomputed"
SMALL_CHANGE = 1.002  # logged losses, and copies of buffers for a repeat: all that comes on top


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def results(folder: Path, name: str) -> dict[str, Any]:
    text = (folder / f"{name}.json").read_text()
    assert str(folder) not in text
    assert f'"{socket.gethostname()}"' not in text
    read: dict[str, Any] = json.loads(text)
    assert read["environment"]["command"] == f"OMP_NUM_THREADS=1 python benchmarks/{name}.py --quick"
    assert read["environment"]["versions"]["torch"] == torch.__version__
    return read


def test_peak_memory(tmp_path: Path) -> None:
    done = run("peak_memory.py", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        f"peak_memory.{end}" for end in ("md", "json", "png")
    }
    measured = results(tmp_path, "peak_memory")
    table = (tmp_path / "peak_memory.md").read_text()
    assert "live tensor bytes" in table
    assert "| 8 dense heads " in table
    assert "| 8 dense heads " in done.stdout

    rows = {(row["case"], row["schedule"]): row for row in measured["rows"]}
    peak = {key: row["activation_bytes"] for key, row in rows.items()}
    for (case, _), row in rows.items():
        assert row["peak_bytes"] == row["start_bytes"] + row["activation_bytes"]
        # parameters and gradients at least, and the same whatever the schedule
        assert row["start_bytes"] > 2 * row["gradient_bytes"] > 0
        assert row["start_bytes"] == next(r["start_bytes"] for (c, _), r in rows.items() if c == case)

    # with one head there is nothing to save; with eight only summed takes more
    one = peak["dense-1", "summed"]
    assert peak["dense-1", "sequential"] == one
    assert one <= peak["dense-1", "split"] <= one + 4  # the scalar through which the cut's gradient goes back
    assert peak["dense-8", "sequential"] <= SMALL_CHANGE * one
    assert peak["dense-8", "split"] <= 1.03 * one
    assert peak["dense-8", "split"] <= 0.5 * peak["dense-8", "summed"]
    assert peak["dense-8", RECOMPUTED] <= SMALL_CHANGE * peak["dense-1", RECOMPUTED] < one

    assert peak["digits", "split"] < peak["digits", "summed"]
    assert peak["digits", "sequential"] <= SMALL_CHANGE * peak["digits", "split"]

    alone = peak["independent-larger", "split"]
    assert peak["independent-smaller", "split"] < alone < peak["independent", "summed"]
    for schedule in ("sequential", "split"):
        assert alone <= peak["independent", schedule] <= SMALL_CHANGE * alone

    ratio = rows["dense-8", "split"]["time_over_summed"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert len(rows["dense-8", "split"]["time_s"]) == ratio["rounds"]
    check_steps(measured["step_rows"])
    for row in measured["step_rows"]:
        line = f"| {', '.join(row['recompute']) or 'nothing'} "
        assert line in table
        assert line in done.stdout
    check_picture(tmp_path / "peak_memory.png")


def check_steps(rows: list[dict[str, Any]]) -> None:
    """Activations of the engine's steps go down as the batch is cut, and where the trunk is recomputed."""
    for row in rows:
        assert row["peak_bytes"] == row["start_bytes"] + row["gradient_bytes"] + row["activation_bytes"]
        assert row["gradient_bytes"] > 0
        ratio = row["time_over_one"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert len(row["time_s"]) == ratio["rounds"]
    over_one = {row["way"]: row["activation_over_one"] for row in rows}
    assert over_one.pop("K=1") == 1
    for number in (2, 4, 8):
        # a micro-batch keeps its share; what doesn't shrink with it is little
        assert 1 / number <= over_one.pop(f"K={number}") <= 1 / number + 0.01
    recomputed = [row for row in rows if row["recompute"]]
    assert len(recomputed) == len(over_one) >= 3
    assert all(over_one[row["way"]] <= 0.8 / row["accumulate"] for row in recomputed)


def check_picture(path: Path) -> None:
    """A PNG of some size that shows something in colour."""
    image = matplotlib.image.imread(path)
    height, width, _ = image.shape
    assert height > 400
    assert width > 1000
    colours = {tuple(pixel) for pixel in (255 * image[::4, ::4, :3]).astype(int).reshape(-1, 3)}
    assert any(max(colour) - min(colour) > 100 for colour in colours)


def test_step_time(tmp_path: Path) -> None:
    done = run("step_time.py", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"step_time.md", "step_time.json"}
    rows = results(tmp_path, "step_time")["rows"]
    assert len(rows) == 6
    (grouped,) = [row for row in rows if "grouped" in row["what"]]
    assert 0 < grouped["peak_bytes"] <= grouped["baseline_peak_bytes"]
    assert "Peak memory of a step, 8 linear heads, grouped" in done.stdout
    for row in rows:
        ratio = row["ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert len(row["times_s"]) == len(row["baseline_times_s"]) == ratio["rounds"] == 3
        assert f"{ratio['median']:.3f}" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    done = run("peak_memory.py", "--device", "cuda")
    assert done.returncode == 1
    assert done.stderr == ("error: --device cuda: this PyTorch finds no CUDA device. Use --device cpu.\n")
