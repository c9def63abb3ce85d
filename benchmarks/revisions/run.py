"""Two revisions as folders, and the processes that observe them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "RANKS",
    "ROOT",
    "Side",
    "checked_out",
    "copied_cases",
    "observe_alone",
    "observe_on_ranks",
    "start",
]

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
_CASES = ("benchmarks/common.py", "benchmarks/markdown_tables.py", "benchmarks/revisions/*.py", "tests/*.py")


@dataclass
class Side:
    """A revision.

    Attributes:
        name: ``base`` or ``head``.
        package: the folder that holds the package.
        cases: the folder that holds what is run on it.
        written: files with what its processes saw.
        failures: what processes that failed had to say.
    """

    name: str
    package: Path
    cases: Path
    written: list[Path] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """A folder with the package of a revision, which is a commit or a folder itself. Of a commit it is a
    temporary worktree; of a folder a copy, since whoever waits for the end goes on editing."""
    if (Path(revision) / "mtaccum" / "__init__.py").is_file():
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(revision) / "mtaccum", folder / "mtaccum", ignore=no_caches)
        yield folder
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


def copied_cases(folder: Path) -> Path:
    """A copy of what is run, which both revisions run, with folders as they are in the checkout."""
    for pattern in _CASES:
        for path in ROOT.glob(pattern):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return folder


def start(side: Side, what: str, *arguments: str, **settings: int | None) -> subprocess.Popen[str]:
    """A process that imports the package of a revision, and the cases."""
    paths = [side.package, side.cases / "benchmarks", side.cases / "tests"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0",  # sets of names in the same order
        "OMP_NUM_THREADS": "1",
    }
    worker = side.cases / "benchmarks" / "revisions" / "worker.py"
    command = [sys.executable, str(worker), what, "--package", str(side.package), *arguments]
    return subprocess.Popen(command, env=environment, text=True, **settings)  # type: ignore[call-overload, no-any-return]


def observe_alone(sides: Sequence[Side], folder: Path, arguments: Sequence[str], processes: int) -> None:
    """Let the revisions do the cases of one process side by side, each in some processes that share them.
    What they see is written into files in the folder."""
    shares = [f"{number}/{processes}" for number in range(processes)]
    _wait(
        _observe(side, "single", folder / f"{side.name}-{number}.jsonl", ["--share", share, *arguments])
        for side in sides
        for number, share in enumerate(shares)
    )


def observe_on_ranks(sides: Sequence[Side], folder: Path, arguments: Sequence[str]) -> None:
    """Let the revisions do the cases of two ranks, one revision after the other."""
    for side in sides:
        given = ["--store", str(folder / f"{side.name}-store"), *arguments]
        _wait(
            _observe(side, "ranks", folder / f"{side.name}-rank-{rank}.jsonl", ["--rank", str(rank), *given])
            for rank in range(RANKS)
        )


@dataclass
class _Running:
    side: Side
    process: subprocess.Popen[str]
    errors: Path


def _observe(side: Side, what: str, output: Path, arguments: Sequence[str]) -> _Running:
    errors = output.with_suffix(".err")
    with errors.open("w") as stream:
        process = start(side, what, "--output", str(output), *arguments, stderr=stream.fileno())
    side.written.append(output)
    return _Running(side, process, errors)


def _wait(started: Iterable[_Running]) -> None:
    """Until all have ended, or one has failed: of that one it is noted why, and the others are ended."""
    running: list[_Running] = []
    with ThreadPoolExecutor() as waiting:
        try:
            running.extend(started)
            of_process = {waiting.submit(one.process.wait): one for one in running}
            for ended in as_completed(of_process):
                if code := ended.result():
                    one = of_process[ended]
                    why = one.errors.read_text(encoding="utf-8").strip() or f"exit code {code}"
                    one.side.failures.append(f"a process of {one.side.name} failed:\n{why}")
                    break
        finally:
            for one in running:
                one.process.kill()
