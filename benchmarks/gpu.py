"""Everything that a CUDA card can tell, in one command under ten minutes: ``python benchmarks/gpu.py``.

The tests marked ``gpu``, and the tables of memory, time, predictions, transfers and ranks, each as a part in
a process of its own with a limit of its own, in order of importance. A part that fails, hangs or lacks a
library is reported, and the others go on. All goes into one file, ``gpu.json``, which is written after each
part. It needs this checkout, torch and numpy; what else is missing is said first.

    python benchmarks/gpu.py                        # on a machine with a CUDA card
    python benchmarks/gpu.py --quick --device cpu   # a look at whether it runs, without one
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_processes import ROOT, Part, Result, run_part, write_json
from gpu_setting import NotHere, Setting
from gpu_tables import tables_of

# In order of importance: what comes last may find the time used up. The limits are those of slow machines; on
# most a part takes a quarter of it.
PARTS = {
    "machine": Part("the machine", "gpu_machine:machine", 60),
    "tests": Part("tests marked gpu", "gpu_tests:tests", 180),
    "prediction": Part("peaks predicted for a card, beside measured ones", "gpu_memory:prediction", 120),
    "reserve": Part("context, workspaces, fragmentation: the reserve", "gpu_reserve:reserve", 90),
    "memory": Part("peak memory of the schedules", "gpu_memory:memory", 90),
    "time": Part("step time", "gpu_times:step_times", 120),
    "syncs": Part("device synchronisations in a step", "gpu_syncs:synchronisations", 60),
    "ranks": Part("several ranks", "gpu_ranks:ranks", 120),
    "precision": Part("16-bit steps", "gpu_times:precision", 60),
    "recompute": Part("recompute and micro-batches", "gpu_times:recompute", 60),
    "offload": Part("saved activations in the host's memory", "gpu_transfers:offload", 60),
    "copies": Part("copies between host and device", "gpu_transfers:copies", 60),
    "compile": Part("compiled nodes", "gpu_times:compiled", 150),
}
BUDGET_S = 570.0
# by what is imported: what can't be done without it
NEEDED = {
    "torch": "anything",
    "numpy": "anything",
    "pytest": "the tests",
    "torchmetrics": "tests that train",
    "tensorboard": "tests that train",
    "rich": "tests that train",
}
ESSENTIAL = ("torch", "numpy")


def missing() -> dict[str, str]:
    """What isn't installed, with what it would be needed for."""
    return {name: what for name, what in NEEDED.items() if not _is_installed(name)}


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # half of it
        return False


def say_missing(gone: dict[str, str]) -> None:
    """Before anything is run; ends the program where nothing can be."""
    for name, what in gone.items():
        print(f"missing: {name}, for {what} (pip install {name})", flush=True)
    if essential := [name for name in ESSENTIAL if name in gone]:
        sys.exit(f"error: {' and '.join(essential)} must be installed; nothing was run.")


class Report:
    """What was found so far, and the file that holds it."""

    def __init__(self, options: argparse.Namespace, gone: dict[str, str]) -> None:
        self._file = options.output / "gpu.json"
        self.started = time.monotonic()
        self.found: dict[str, Any] = {
            "environment": {"command": command_of(options), "date": datetime.date.today().isoformat()},
            "quick": options.quick,
            "missing": gone,
            "elapsed_s": 0.0,
            "parts": {},
        }

    def add(self, name: str, result: Result) -> None:
        """Take up a part's result, write the file, and print it."""
        found = self.found
        if name == "machine":
            for row in result.rows:
                found["environment"] = {**row, **found["environment"]}
        found["parts"][name] = result.as_dict()
        found["elapsed_s"] = round(time.monotonic() - self.started, 1)
        write_json(self._file, found)
        try:
            text = tables_of(name, found)
        except Exception as error:  # what was found is in the file, and more is to come
            text = f"no table of {name}: {type(error).__name__}: {error}"
        print(f"\n{text}", flush=True)

    def end(self) -> int:
        """Say what came of it; the exit code."""
        parts = self.found["parts"].items()
        bad = [
            f"{name} ({part['status']})" for name, part in parts if part["status"] not in ("ok", "skipped")
        ]
        print(f"\n{len(self.found['parts'])} parts in {self.found['elapsed_s']:.0f} s; written: {self._file}")
        if bad:
            print(f"not as it should be: {', '.join(bad)}")
        return int(bool(bad))


def command_of(options: argparse.Namespace) -> str:
    """The command as it is to be typed again; folders are left out."""
    threads = os.environ.get("OMP_NUM_THREADS")
    words = [] if threads is None else [f"OMP_NUM_THREADS={threads}"]
    words += ["python", "benchmarks/gpu.py", *["--quick"] * options.quick]
    words += ["--device", options.device] if options.device != "cuda" else []
    words += ["--only", *options.only] if options.only else []
    words += ["--budget", f"{options.budget:g}"] if options.budget != BUDGET_S else []
    return shlex.join(words)


def run_all(options: argparse.Namespace, parts: dict[str, Part], report: Report) -> None:
    """Run the parts; on the CPU, where times are a look only, two of them side by side."""
    deadline = report.started + options.budget
    with tempfile.TemporaryDirectory() as folder:

        def run(name: str) -> Result:
            print(f"{name} ...", flush=True)
            return run_part(name, parts[name], options, Path(folder), deadline)

        report.add("machine", machine := run("machine"))
        names = [name for name in parts if name != "machine" and (not options.only or name in options.only)]
        if not machine.rows:
            names = []  # without a device there is nothing to find out
        results: Iterable[Result]
        if options.quick and options.device == "cpu":
            with ThreadPoolExecutor(2) as pool:
                results = [*pool.map(run, names)]
        else:  # not in a thread, which Ctrl-C would not reach
            results = map(run, names)
        for name, result in zip(names, results, strict=True):
            report.add(name, result)


def work(options: argparse.Namespace) -> None:
    """What a process does that was started for a part: run its function, a line for each row it yields."""
    setting = Setting(options.device, options.quick, options.rows.parent)
    module, _, function = options.part.partition(":")
    with options.rows.open("a", encoding="utf-8") as file:

        def put(**entry: Any) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        try:
            for row in getattr(importlib.import_module(module), function)(setting):
                put(row=row)
        except NotHere as reason:
            put(skipped=str(reason))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; those without help are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description="Tests and tables of a CUDA card, in one command.")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1, or cpu")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds: whether it runs")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds for all ({BUDGET_S:g})")
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder, help="folder for gpu.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """The command."""
    options = parse(sys.argv[1:])
    if options.part:
        sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed
        work(options)
        return
    gone = missing()
    say_missing(gone)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    report = Report(options, gone)
    run_all(options, PARTS, report)
    sys.exit(report.end())


if __name__ == "__main__":
    main()
