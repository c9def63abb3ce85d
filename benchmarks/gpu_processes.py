"""Parts of ``gpu.py`` in processes of their own, which may fail, hang or die without harm to the others."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Part", "Result", "run_part", "write_json"]

ROOT = Path(__file__).resolve().parents[1]
_LEAST_S = 5.0  # with less left of the time a part isn't begun
_QUICK_LIMIT_S = 300.0
_TAIL = 30  # lines of what a failed part has said


@dataclass(frozen=True)
class Part:
    """A part by its function, ``module:function``, which gets a ``Setting`` and yields rows.

    Attributes:
        title: for people.
        limit_s: after so many seconds it is ended; what it has found till then stays.
    """

    title: str
    function: str
    limit_s: float


@dataclass
class Result:
    """What came of a part.

    Attributes:
        status: ``ok``, ``skipped``, ``failed``, ``timed out`` or ``not run``.
        reason: why it isn't ok, and the end of what was printed.
    """

    title: str
    status: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    elapsed_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the file of results."""
        return {**vars(self), "elapsed_s": round(self.elapsed_s, 1)}


def run_part(name: str, part: Part, options: argparse.Namespace, folder: Path, deadline: float) -> Result:
    """Run a part in a new process until it ends, or its time does.

    Args:
        folder: an empty one, or one with other parts in it.
        deadline: of all parts, by ``time.monotonic``.
    """
    started = time.monotonic()
    # what is quick takes long only where it hangs, or on a busy machine
    limit_s = min(_QUICK_LIMIT_S if options.quick else part.limit_s, deadline - started)
    if limit_s < _LEAST_S:
        return Result(part.title, "not run", reason="the time for all parts was used up")
    own = folder / name
    own.mkdir()
    rows, log = own / "rows", own / "log"
    code = _run(_command(part, options, rows), own, log, limit_s)
    found = _read(rows)
    result = Result(part.title, "ok", [entry["row"] for entry in found if "row" in entry])
    result.elapsed_s = time.monotonic() - started
    if code is None:
        result.status, result.reason = "timed out", f"ended after {limit_s:.0f} s\n{_tail(log, folder)}"
    elif code:
        result.status, result.reason = "failed", f"exit code {code}\n{_tail(log, folder)}"
    elif skipped := [entry["skipped"] for entry in found if "skipped" in entry]:
        result.status, result.reason = "ok" if result.rows else "skipped", skipped[0]
    return result


def _command(part: Part, options: argparse.Namespace, rows: Path) -> list[str]:
    hidden = ["--part", part.function, "--rows", str(rows), "--device", options.device]
    return [sys.executable, str(Path(__file__).with_name("gpu.py")), *hidden, *["--quick"] * options.quick]


def _run(command: list[str], folder: Path, log: Path, limit_s: float) -> int | None:
    """The exit code; None if the time was over. Nothing that it started outlives it."""
    temporary = folder / "temporary"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(rows: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may be cut where the process was ended."""
    found = []
    for line in rows.read_text(encoding="utf-8").splitlines() if rows.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _tail(log: Path, folder: Path) -> str:
    """The end of what a process printed, without the names of folders of this machine."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    text = "\n".join(lines)
    for path, name in ((folder, "TEMPORARY"), (ROOT, "."), (sys.prefix, "PYTHON"), (Path.home(), "~")):
        text = text.replace(str(path), name)
    return text


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all: the program may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
