"""The drawing of one-line breaks, on a package of two functions of which one is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from breaks_places import draw

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[2] / "benchmarks"
SUMS = '''
"""Sums."""


def total(values: list[int], start: int = 0) -> int:
    """All values, and 1 for luck."""
    if start < 0:
        raise ValueError("start is 1 or more")
    return sum(values) + start


def thrice(value: int) -> int:
    return value * 3
'''
TEST = """
from toy.core.sums import total

def test_total():
    assert total([1, 2]) == 3
"""
NOTICES = "tests/test_sums.py::test_total"
# the same function elsewhere, in other words, and wrapped
MOVED = """
def add(
    numbers: list[int],
    start: int = 0,
) -> int:
    if start < 0:
        raise ValueError("start is 1 or more")
    return (
        sum(numbers)
        + start
    )
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for folder in ("toy/core", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("toy/__init__.py", "toy/core/__init__.py"):
        (tmp_path / file).touch()
    (tmp_path / "toy/core/sums.py").write_text(SUMS)
    (tmp_path / "tests/test_sums.py").write_text(TEST)
    return tmp_path


def run(root: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code, and printed lines without seconds."""
    command = [sys.executable, str(FOLDER / "breaks.py"), *arguments, "--root", str(root)]
    command += ["--package", "toy", "--tests", "tests"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("follows")]
    return done.returncode, [line.partition(" s  ")[2] or line for line in lines]


def records(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "tests/breaks.jsonl").read_text().splitlines()]


def test_breaks_are_drawn_and_recorded_with_the_test_that_notices_them(toy: Path) -> None:
    code, lines = run(toy, "core=5")
    drawn = records(toy)
    assert code == 0
    assert lines == [record["noticed_by"] or "noticed by nothing" for record in drawn]
    assert {record["broken_line"]: record["noticed_by"] for record in drawn} == {
        "def total(values: list[int], start: int = 1) -> int:": NOTICES,
        "if start < 1:": NOTICES,
        "return max(values) + start": NOTICES,
        "pass": None,  # in place of the error, which no test comes to
        "return (value * 3) + 1": None,
    }
    assert [record["id"] for record in drawn] == [f"core-00{number}" for number in range(5)]
    assert {record["function"] for record in drawn} == {"total", "thrice"}
    assert (toy / "toy/core/sums.py").read_text() == SUMS

    kept = (toy / "tests/breaks.jsonl").read_text().splitlines(keepends=True)
    (toy / "tests/breaks.jsonl").write_text("".join(kept[:3]))
    assert run(toy, "core=5") == (0, lines[3:])  # goes on behind what is recorded
    assert (toy / "tests/breaks.jsonl").read_text() == "".join(kept)


def test_more_breaks_are_drawn_from_sources_that_have_changed(toy: Path) -> None:
    drawn = draw(toy / "toy", "core", 3, 0)
    records_file = toy / "tests/breaks.jsonl"
    records_file.write_text("".join(f"{json.dumps(made.as_dict())}\n" for made in drawn))
    sums = toy / "toy/core/sums.py"
    sums.write_text(f"{SUMS}\n\ndef half(value: int) -> float:\n    return value / 2\n")
    code, lines = run(toy, "core=+2")
    assert code == 0
    assert len(lines) == 2
    assert [record["id"] for record in records(toy)] == [f"core-00{number}" for number in range(5)]
    assert len({(record["statement"], record["broken_statement"]) for record in records(toy)}) == 5
    assert "half" in {record["function"] for record in records(toy)}


def test_recorded_breaks_are_noticed_again_where_code_and_tests_have_moved(toy: Path) -> None:
    drawn = [replace(made, noticed_by=NOTICES) for made in draw(toy / "toy", "core", 5, 0)]
    recorded = [made for made in drawn if made.function == "total" and made.broken_line != "pass"]
    lines = [json.dumps(made.as_dict()) for made in recorded]
    (toy / "tests/breaks.jsonl").write_text("\n".join(lines) + "\n")
    (toy / "toy/core/sums.py").unlink()
    (toy / "toy/adding.py").write_text(MOVED)
    (toy / "tests/test_sums.py").unlink()
    test = toy / "tests/test_adding.py"
    test.write_text(TEST.replace("toy.core.sums", "toy.adding").replace("total", "add"))
    code, lines = run(toy, "--again")
    assert code == 0
    assert lines[-1] == "0 noticed again, 3 not found any more, 0 NOT noticed"

    words = {"total": "add", "values": "numbers", "test_total": "test_add"}
    (toy / "tests/breaks_renames.json").write_text(json.dumps(words))
    code, lines = run(toy, "--again")
    assert code == 0
    assert lines == [
        *3 * ["noticed again: tests/test_adding.py::test_add"],
        "3 noticed again, 0 not found any more, 0 NOT noticed",
    ]

    test.write_text(test.read_text().replace("== 3", "> 0"))  # a test that says less
    code, lines = run(toy, "--again")
    assert code == 1
    assert lines[-1] == "1 noticed again, 0 not found any more, 2 NOT noticed"
    assert "NOT noticed: return sum(numbers) + start -> return max(numbers) + start, in adding.py" in lines
