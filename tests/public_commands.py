"""What the commands leave in a run's folder, and their exit codes, from tiny runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from commands import Forked

_LIMIT_S = 300.0  # for all of them side by side, on a busy machine; what takes longer hangs
_TINY = ["trunk=none", "batch_size=4", "data.train.size=8", "data.val.size=4", "data.eval_batch_size=4"]
_STEPS = ["trainer.max_steps=2", "trainer.eval_every=1", "trainer.checkpoint_every=1", "trainer.log_every=1"]
_WRONG = ["+tasks=[seg]", "batch_size=0"]
# by command and how it ends; each writes into a folder of its own
RUNS = {
    "train": {
        "finished": ["+tasks=[seg,cls]", *_TINY, *_STEPS],
        "finished, after a plan": ["+tasks=[cls]", *_TINY, *_STEPS, "plan=auto", "memory.budget=1GiB"],
        "interrupted": ["+tasks=[cls]", *_TINY, *_STEPS, "trainer.max_steps=1000000"],  # by Ctrl-C
        "a wrong option": _WRONG,
    },
    "plan": {
        "a plan fits": ["+tasks=[cls]", *_TINY, "memory.budget=1GiB"],
        "no plan fits": ["+tasks=[cls]", *_TINY, "memory.budget=1KiB"],
        "a wrong option": _WRONG,
    },
    "verify": {
        "exact": ["+tasks=[cls]", *_TINY],
        "faults found": [
            "+tasks=[cls]",
            *_TINY,
            "trunk=conv",
            "accumulate=2",
        ],  # BatchNorm sees micro-batches
        "a wrong option": _WRONG,
    },
}
_INTERRUPTED = "interrupted"


def collect(folder: Path, forked: Forked) -> dict[str, Any]:
    """By command and how it ends: the exit code, and the files in its folder (not where it was interrupted:
    how far it came then is chance)."""
    ways = [(command, way) for command, endings in RUNS.items() for way in endings]
    jobs = [_job(folder / f"{command}-{way}", command, way) for command, way in ways]
    found: dict[str, Any] = {command: {} for command in RUNS}
    for (command, way), job, ended in zip(ways, jobs, forked.run(*jobs), strict=True):
        (code,) = ended.codes
        here = Path(job["folder"]) / "here"
        assert code >= 0, f"{command}, {way}: ended by signal {-code}\n{ended.out[0]}\n{ended.err[0]}"
        found[command][way] = {"exit code": code}
        if way != _INTERRUPTED:
            found[command][way]["files"] = files_in(here)
    return found


def files_in(folder: Path) -> list[str]:
    """Files by name; what is different in each run stands as ``*``."""
    if not folder.is_dir():
        return []
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted({re.sub(r"(events\.out\.tfevents)\..*", r"\1.*", name) for name in names})


def _job(folder: Path, command: str, way: str) -> dict[str, Any]:
    folder.mkdir()
    return {
        "folder": str(folder),
        "command": command,
        "arguments": [*RUNS[command][way], "hydra.run.dir=here"],
        "ranks": 0,
        "limit_s": _LIMIT_S,
        # once a state is there
        "interrupt_at": str(folder / "here" / "last.pt") if way == _INTERRUPTED else None,
    }
