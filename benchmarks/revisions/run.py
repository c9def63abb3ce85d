"""Two revisions as folders, and the processes that observe them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ROOT", "Side", "checked_out", "command", "environment", "observe_alone", "observe_on_ranks"]

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
RANKS = 2


@dataclass
class Side:
    """A revision.

    Attributes:
        name: ``base`` or ``head``.
        package: the folder that holds the package.
        written: files with what its processes saw.
        failures: what processes that failed had to say.
    """

    name: str
    package: Path
    written: list[Path] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The folder of a revision: itself if it is one with the package in it; or a temporary worktree."""
    if (Path(revision) / "mtaccum" / "__init__.py").is_file():
        yield Path(revision).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    add = [*git, "add", "--quiet", "--detach", str(folder), revision]
    done = subprocess.run(add, capture_output=True, text=True, check=False)
    if done.returncode:
        what = "neither a folder with the package in it nor a revision"
        sys.exit(f"error: {revision!r} is {what}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)


def environment(package: Path) -> dict[str, str]:
    """For a process that imports the package of one revision, and the cases of this one."""
    paths = [package, ROOT / "benchmarks", ROOT / "tests"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",  # a folder may be anyone's
        "PYTHONHASHSEED": "0",  # sets of names in the same order
        "OMP_NUM_THREADS": "1",
    }


def command(what: str, package: Path, *more: str) -> list[str]:
    """The command line of a worker."""
    return [sys.executable, str(WORKER), what, "--package", str(package), *more]


def observe_alone(sides: Sequence[Side], folder: Path, arguments: Sequence[str], processes: int) -> None:
    """Let the revisions do the cases of one process side by side, each in some processes that share them.
    What they see is written into files in the folder."""
    shares = [f"{number}/{processes}" for number in range(processes)]
    _wait(
        _run(side, "single", folder / f"{side.name}-{number}.jsonl", ["--share", share, *arguments])
        for side in sides
        for number, share in enumerate(shares)
    )


def observe_on_ranks(sides: Sequence[Side], folder: Path, arguments: Sequence[str]) -> None:
    """Let the revisions do the cases of two ranks, one revision after the other."""
    for side in sides:
        given = ["--store", str(folder / f"{side.name}-store"), *arguments]
        _wait(
            _run(side, "ranks", folder / f"{side.name}-rank-{rank}.jsonl", ["--rank", str(rank), *given])
            for rank in range(RANKS)
        )


@dataclass
class _Running:
    side: Side
    process: subprocess.Popen[str]
    errors: Path


def _run(side: Side, what: str, output: Path, arguments: Sequence[str]) -> _Running:
    line = command(what, side.package, "--output", str(output), *arguments)
    errors = output.with_suffix(".err")
    with errors.open("w") as stream:
        process = subprocess.Popen(line, env=environment(side.package), stderr=stream, text=True)
    side.written.append(output)
    return _Running(side, process, errors)


def _wait(started: Iterable[_Running]) -> None:
    """Until all have ended. Of those that failed it is noted why."""
    running: list[_Running] = []
    try:
        running.extend(started)
        for one in running:
            if one.process.wait():
                why = one.errors.read_text(encoding="utf-8").strip() or f"exit code {one.process.returncode}"
                one.side.failures.append(f"a process of {one.side.name} failed:\n{why}")
    finally:
        for one in running:
            one.process.kill()
