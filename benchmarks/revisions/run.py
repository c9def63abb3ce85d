"""Two revisions as folders, and the processes that observe them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from revisions.report import Observations, read

__all__ = ["ROOT", "Side", "checked_out", "command", "environment", "observations"]

ROOT = Path(__file__).resolve().parents[2]
_WORKER = Path(__file__).with_name("worker.py")
_RANKS = 2
Side = tuple[str, Path]  # ``base`` or ``head``, and the folder that holds the package


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The folder of a revision: itself if it is one with the package in it; or a temporary worktree."""
    if (Path(revision) / "mtaccum" / "__init__.py").is_file():
        yield Path(revision).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    done = subprocess.run(
        [*git, "add", "--quiet", "--detach", str(folder), revision],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"error: {revision!r} is neither a folder with the package nor a revision: {done.stderr.strip()}"
        )
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)


def environment(package: Path) -> dict[str, str]:
    """For a process that imports the package of one revision, and cases of this one."""
    paths = [package, ROOT / "benchmarks", ROOT / "tests"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }


def command(what: str, package: Path, *more: str) -> list[str]:
    """The command line of a worker."""
    return [sys.executable, str(_WORKER), what, "--package", str(package), *more]


def observations(
    sides: Sequence[Side], folder: Path, arguments: Sequence[str]
) -> tuple[Observations, Observations]:
    """What each revision does in all cases: side by side on one process, then one after the other on two."""
    written: dict[str, list[Path]] = {name: [] for name, _ in sides}
    singles = []
    for name, package in sides:
        written[name].append(folder / f"{name}.jsonl")
        more = "--output", str(written[name][-1]), *arguments
        singles.append((name, command("single", package, *more), package))
    _together(singles)
    for name, package in sides:
        ranks = []
        for rank in range(_RANKS):
            written[name].append(folder / f"{name}-{rank}.jsonl")
            more = "--output", str(written[name][-1]), "--rank", str(rank), *arguments
            store = "--store", str(folder / f"{name}-store")
            ranks.append((name, command("ranks", package, *more, *store), package))
        _together(ranks)
    base, head = (read(path for path in written[name] if path.exists()) for name, _ in sides)
    return base, head


def _together(runs: Sequence[tuple[str, list[str], Path]]) -> None:
    """Run some workers at the same time. One that fails says so; what it had seen stands in its file."""
    processes = [
        (name, subprocess.Popen(line, env=environment(package), stderr=subprocess.PIPE, text=True))
        for name, line, package in runs
    ]
    try:
        for name, process in processes:
            _, errors = process.communicate()
            if process.returncode:
                print(f"a process of {name} ended with {process.returncode}:\n{errors}", file=sys.stderr)
    finally:
        for _, process in processes:
            process.kill()
