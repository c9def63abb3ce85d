"""The benchmark of two ranks as a user runs it: bytes that hold anywhere, and a complete report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import LIMIT_S

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ddp.py"
NAIVE = "DDP in every pass"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def test_ddp(tmp_path: Path) -> None:
    done = run("--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"ddp.md", "ddp.json"}
    text = (tmp_path / "ddp.json").read_text()
    assert str(tmp_path) not in text
    found = json.loads(text)
    assert found["environment"]["command"] == "OMP_NUM_THREADS=1 python benchmarks/ddp.py --quick"

    rows = {(row["heads"], row["micro_batches"]): row for row in found["bytes"]}
    assert set(rows) == {(heads, k) for heads in (1, 4, 8) for k in (1, 4)}
    for (heads, k), row in rows.items():
        # every gradient once per step, whatever the heads and micro-batches; naively once in every pass
        assert row["over_gradient_bytes"] == {"split": 1.0, "sequential": 1.0, NAIVE: float(heads * k)}
        assert row["reduced_bytes"]["split"] == row["gradient_bytes"] > 0

    assert len(found["rows"]) == 4
    table = (tmp_path / "ddp.md").read_text()
    for row in found["rows"]:
        ratio = row["ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert len(row["times_s"]) == len(row["baseline_times_s"]) == ratio["rounds"] == 3
        assert f"{ratio['median']:.3f}" in done.stdout
        assert row["what"] in table


def test_no_pairs_at_all() -> None:
    done = run("--pairs", "0")
    assert done.returncode == 2
    assert "--pairs must be at least 1, got 0." in done.stderr
