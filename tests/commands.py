"""Commands run in forked processes (``forked_ranks.py``), which takes less time than starting each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 600.0  # for a command: only what hangs meets it, however busy the machine is


def environment(folder: Path) -> dict[str, str]:
    """For a command that starts in this folder: one thread, and temporary files in it."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}


@dataclass
class Ended:
    """What came of a job: of each rank the exit code, and what it wrote."""

    codes: list[int]
    out: list[str]
    err: list[str]


class Forked:
    """Runs commands in processes forked from one that has imported everything, several at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._outputs = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_ranks.py"))],
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ready = False

    def run(self, *jobs: dict[str, Any]) -> list[Ended]:
        """Jobs, with fields as ``forked_ranks.Job`` has them; all at the same time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._ready:
            self._ready = self._process.stdout.readline() == "ready\n"
        outputs = []
        for job in jobs:
            outputs.append(self._folder / f"job-{self._outputs}")
            outputs[-1].mkdir()
            self._outputs += 1
            job["output"] = str(outputs[-1])
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        results = json.loads(self._process.stdout.readline())
        return [
            Ended(
                **result,
                out=[(output / f"out-{rank}").read_text() for rank in range(len(result["codes"]))],
                err=[
                    without_warning((output / f"err-{rank}").read_text())
                    for rank in range(len(result["codes"]))
                ],
            )
            for result, output in zip(results, outputs, strict=True)
        ]

    def command(self, folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What comes of ``python -m mtaccum.name arguments``, typed in a folder."""
        job = {"folder": str(folder), "arguments": [*arguments], "command": name, "ranks": 0}
        (ended,) = self.run({**job, "limit_s": LIMIT_S})
        return subprocess.CompletedProcess(arguments, *ended.codes, *ended.out, *ended.err)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def without_warning(error: str) -> str:
    """Standard error without the warning that BatchNorm sees a rank's part only, which is given once."""
    rest, warnings = re.subn(r"(?m)^\S+ InexactWarning: BatchNorm normalises .*\n  .*\n", "", error)
    assert warnings <= 1
    return rest
