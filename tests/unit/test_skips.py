"""Skips that nobody listed fail the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from skips import allowed

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import skips
pytest_addoption = skips.add_option
pytest_configure = skips.register
"""


def skipped(reason: str) -> str:
    return f"import pytest\n@pytest.mark.skip(reason={reason!r})\ndef test_a(): pass\ndef test_b(): pass\n"


def whole_file(settings: str) -> str:
    return f"import pytest\npytest.importorskip('nothing_of_that_name'{settings})\n"


FINE = {
    "listed": skipped("needs a CUDA device"),
    "expected": "import pytest\n@pytest.mark.xfail(reason='later')\ndef test_a(): assert False\n",
}
WITHOUT_EXTRAS = {
    "test": skipped("needs the extra vision"),
    "file": whole_file(", reason='needs the extra text'"),
}
NEVER = {"lazy": skipped("felt like it"), "unexplained": whole_file("")}


def faults(folder: Path, texts: dict[str, str], *options: str) -> tuple[int, set[str]]:
    """The exit code of a run, and the files of which it says that they skip what they may not."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    _, _, said = done.stdout.partition("skips.txt doesn't allow here")
    return done.returncode, set(re.findall(r"^test_(\w+)\.py.*: ", said, re.MULTILINE))


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_a_skip_must_be_listed(tmp_path: Path, processes: tuple[str, ...]) -> None:
    texts = FINE | WITHOUT_EXTRAS | NEVER
    assert faults(tmp_path, texts, *processes) == (1, set(NEVER))
    assert faults(tmp_path, texts, *processes, "--strict-skips") == (1, {*NEVER, *WITHOUT_EXTRAS})


def test_what_is_listed_and_what_is_expected_to_fail_is_fine(tmp_path: Path) -> None:
    assert faults(tmp_path, FINE, "--strict-skips") == (0, set())


def test_strictly_fewer_are_allowed() -> None:
    assert {"needs a CUDA device"} < set(allowed(strict=True)) < set(allowed(strict=False))
