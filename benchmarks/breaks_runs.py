"""Runs of tests on a copy of the checkout, each in a process forked from this one.

This process imports what package and tests need from others, once, but nothing of the package: a fork imports
that from the copy, as it stands there at that moment.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from breaks_plugin import Chosen, Sample

_LEFT_OUT = (".git", "__pycache__", ".*_cache", "outputs", "multirun", ".hypothesis", "shared")
_NOTES = "notes"
_POLL_S = 0.02
_HANGS_S, _TIMES = 60.0, 10  # a test hangs that takes longer than this, and so many times what it is known to
_UNKNOWN_S = 20.0  # what a test may take of which nothing is known


@dataclass
class Ended:
    """What came of a run.

    Attributes:
        failed: id of the test that failed or hung, or of the file that couldn't be read; None: none.
        failing: all that failed, where a run doesn't stop at the first one.
        passed: seconds that each test took that passed or was skipped.
        numbers: of the tests that ran, as those that follow them name them.
        left: tests that were left out, since there are more like them.
        complete: whether all tests that were asked for ran, or those up to the one that failed.
    """

    failed: str | None = None
    failing: set[str] = field(default_factory=set)
    passed: dict[str, float] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    complete: bool = False


class Copy:
    """A copy of a checkout that breaks are made in."""

    def __init__(self, root: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="breaks-")).resolve()
        self.checkout = self.root / "c"
        shutil.copytree(root, self.checkout, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        self._made = 0

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @contextmanager
    def written(self, path: Path, text: str) -> Iterator[None]:
        """Another text in a file of the copy meanwhile; byte code of the one before stays valid for that."""
        before, stat = path.read_text(encoding="utf-8"), path.stat()
        self._made += 1
        try:
            path.write_text(text, encoding="utf-8")
            os.utime(path, (stat.st_atime, stat.st_mtime + 10 * self._made))
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, (stat.st_atime, stat.st_mtime))

    def run(
        self,
        files: Sequence[str],
        order: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
        reach: dict[str, str] | None = None,
        stop: bool = True,
    ) -> Ended:
        """Run tests of some files.

        Args:
            order: ids of the tests, in order; None: all.
            seconds: that tests are known to take.
            reach: environment for a run of which is followed what tests come to.
            stop: at the first that fails.
        """
        notes = self.root / _NOTES
        notes.write_text("")
        self._made += 1
        temporary = self.root / f"t{self._made}"
        temporary.mkdir()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be(files, order, temporary, reach, stop)
        try:
            _wait(pid, notes, seconds or {})
        finally:
            _kill(pid)
        shutil.rmtree(temporary, ignore_errors=True)
        return _ended(notes)

    def _be(
        self,
        files: Sequence[str],
        order: Sequence[str] | None,
        temporary: Path,
        reach: dict[str, str] | None,
        stop: bool,
    ) -> None:
        """What the forked process does; it doesn't return."""
        code = 70
        try:
            os.setsid()
            log = os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.checkout)
            sys.path.insert(0, str(self.checkout))
            os.environ.update(PYTHONPATH=str(self.checkout), OMP_NUM_THREADS="1", MPLBACKEND="agg")
            os.environ.update(TMPDIR=str(temporary), **(reach or {}))
            tempfile.tempdir = None
            sys.modules["__main__"] = ModuleType("__main__")  # processes that tests start import it again
            if reach is None:
                sys.dont_write_bytecode = True
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            _draw_the_same()
            arguments = [*files, "-q", "-n", "0", "-p", "no:cacheprovider", f"--rootdir={self.checkout}"]
            arguments += ["-x"] if stop else ["--continue-on-collection-errors"]
            plugin = Chosen(order, self.root / _NOTES) if reach is None else Sample(self.root / _NOTES)
            code = int(pytest.main(arguments, plugins=[plugin]))
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                with (self.root / _NOTES).open("a") as file:
                    print(json.dumps({"code": code}), file=file)
            finally:
                os._exit(0)


def _draw_the_same() -> None:
    """Let hypothesis draw the same each time, and not look for a smaller example of what fails."""
    if "hypothesis" in sys.modules:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("breaks", phases=phases, derandomize=True, database=None)
        settings.load_profile("breaks")


def _wait(pid: int, notes: Path, seconds: Mapping[str, float]) -> None:
    """Until a run has ended, or a test of it hangs."""
    size, since, patience_s = 0, time.monotonic(), _HANGS_S + _TIMES * _UNKNOWN_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if (now := notes.stat().st_size) != size:
            size, since = now, time.monotonic()
            running = [note["start"] for note in _read(notes) if "start" in note]
            patience_s = _HANGS_S + _TIMES * seconds.get(running[-1] if running else "", _UNKNOWN_S)
        elif time.monotonic() > since + patience_s:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(_POLL_S)


def _read(notes: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    return [json.loads(line) for line in notes.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _kill(pid: int) -> None:
    """What a run has left, as ranks that hang."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _ended(notes: Path) -> Ended:
    ended, running, asked, code = Ended(), None, 0, None
    for note in _read(notes):
        running = note.get("start", running)
        asked = note.get("collected", asked)
        code = note.get("code", code)
        if "failed" in note:
            ended.failed = ended.failed or note["failed"]
            ended.failing.add(note["failed"])
        if "ended" in note:
            ended.passed[note["ended"]] = note["seconds"]
            running = None
        if "number" in note:
            ended.numbers[note["number"]] = note["of"]
        if "left" in note:
            ended.left.add(note["left"])
    if ended.failed is None and code not in (0, 2, 5):
        ended.failed = running or "collection"  # it hung, or took the process with it
        ended.failing.add(ended.failed)
    for test in ended.failing | ended.left:
        ended.passed.pop(test, None)
    ended.complete = ended.failed is not None or len(ended.passed) == asked
    return ended


def warm(checkout: Path, package: str, folders: Sequence[str]) -> None:
    """Import what pytest, the package and its tests import from elsewhere."""
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    names = {"hypothesis"}  # its plugin imports it as late as in each run
    for folder in (package, *folders):
        for path in (checkout / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module)
    local = {package, *(path.stem for folder in folders for path in (checkout / folder).rglob("*.py"))}
    local |= {path.stem for path in (checkout / "benchmarks").glob("*.py")}
    for name in sorted(names):
        if name.partition(".")[0] not in local:
            try:
                importlib.import_module(name)
            except Exception:  # an extra that isn't here, or what only a script may import
                continue
