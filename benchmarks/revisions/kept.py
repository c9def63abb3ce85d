"""Observations of a revision that are kept, so that many heads are compared with a base that ran once."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from revisions.run import ROOT, Side

__all__ = ["keep", "kept_file"]

_READ = ("architectures.py", "helpers.py", "ranked.py")


def kept_file(folder: Path, revision: str, cases: Path, arguments: Sequence[str]) -> Path | None:
    """Where observations of a revision are, or will be: under its commit, and under all else that they depend
    on, which are cases, versions and processor. None if it is no revision but a folder."""
    line = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    known = hashlib.sha256("\n".join(arguments).encode())
    for path in (
        *sorted(cases.glob("benchmarks/revisions/*.py")),
        *(cases / "tests" / name for name in _READ),
    ):
        known.update(path.read_bytes())
    versions = platform.python_version(), torch.__version__, torch.backends.cpu.get_cpu_capability()
    known.update("\n".join(versions).encode())
    return folder / f"{done.stdout.strip()[:12]}-{known.hexdigest()[:12]}.jsonl"


def keep(side: Side, file: Path) -> None:
    """Put all that a revision's processes saw into one file, unless one of them failed."""
    if side.failures:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(path.read_text("utf-8") for path in side.written), encoding="utf-8")
