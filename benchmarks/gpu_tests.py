"""The tests marked ``gpu``, one row each; also a plugin of pytest, which writes them down as they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_processes import ROOT
from gpu_setting import NotHere, Setting

__all__ = ["tests"]

_VARIABLE = "MTACCUM_GPU_TESTS"  # the file that the plugin writes to
_MARK = re.compile(r"\bmark\.gpu\b")
_MISSING = re.compile(r"No module named '(?!mtaccum)")  # a library that isn't installed
_NO_TESTS = 5  # pytest's exit code where it has found none
_BAD = ("failed", "error", "running")


def tests(setting: Setting) -> Iterator[dict[str, Any]]:
    """Run them; what failed is an error in the end."""
    try:
        import pytest  # noqa: F401
    except ImportError as error:
        raise NotHere("pytest is missing") from error
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if _MARK.search(p.read_text("utf-8"))]
    if not files:
        raise NotHere("this checkout has no tests marked gpu")
    written = setting.folder / "tests"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--continue-on-collection-errors", "-v"]
    command += ["-p", "gpu_tests", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command += [str(path.relative_to(ROOT)) for path in files]
    # plugins that happen to be installed there are not to have a say
    variables = {**os.environ, _VARIABLE: str(written), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables.pop("PYTEST_ADDOPTS", None)
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(command, cwd=ROOT, env=variables)
    bad, lacking = [], False
    for row in _rows(written, process):
        yield row
        lacking = lacking or _MISSING.search(row["reason"]) is not None
        if row["outcome"] in _BAD:
            bad.append(row["test"])
    if bad:
        raise RuntimeError(f"{len(bad)} tests failed: {', '.join(bad)}")
    if process.returncode not in (0, _NO_TESTS) and not lacking:
        raise RuntimeError(f"pytest ended with {process.returncode}; what it said is above")


def _rows(written: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The last state of each test, as soon as it is there, and of one in which the process died."""
    states: dict[str, dict[str, Any]] = {}
    told: set[str] = set()
    ended = False
    while not ended:
        try:
            process.wait(0.5)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        for line in written.read_text("utf-8").splitlines() if written.exists() else ():
            row = json.loads(line) if line.endswith("}") else {"test": ""}
            states[row["test"]] = row
        states.pop("", None)
        for test, row in states.items():
            if test not in told and (ended or row["outcome"] != "running"):
                told.add(test)
                yield row


# --- the plugin ---------------------------------------------------------------------------------------------


def _write(**row: Any) -> None:
    with Path(os.environ[_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins; if nothing more is heard of it, it took the process with it."""
    _write(test=nodeid, outcome="running", reason="the process ended in it")


def pytest_runtest_logreport(report: Any) -> None:
    """A stage of a test has ended: setting up counts if it fails or skips, the end if it fails."""
    if report.when == "call" or not report.passed:
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        _write(
            test=report.nodeid, outcome=outcome, reason=_reason(report.longrepr), elapsed_s=report.duration
        )


def pytest_collectreport(report: Any) -> None:
    """A file that can't be read, for want of a library perhaps."""
    if report.failed or report.skipped:
        outcome = "error" if report.failed else "skipped"
        reason = _reason(report.longrepr)
        if _MISSING.search(reason):
            outcome = "skipped"
        _write(test=report.nodeid, outcome=outcome, reason=reason)


def _reason(said: Any) -> str:
    """The last line of what went wrong."""
    if isinstance(said, tuple):  # of a skip: file, line and reason
        return str(said[2]).removeprefix("Skipped: ")
    lines = [line for line in str(said or "").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[-1].removeprefix("E ").strip()
