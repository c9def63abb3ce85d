"""How far predictions and plans can be trusted: ``python benchmarks/planner_accuracy.py``.

Predicted peaks against those of real steps, and against the resident set of a process; plans for a budget,
run within it; and what the planner finds for a model too large to try by hand. What needs a library that
isn't installed (timm, torchvision) is left out, and said to be. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accuracy_cases import ADAMW, OF_CONFIG, SGDM, Spec
from accuracy_measures import find_plan_of, measure_predictions, plan_and_run
from accuracy_tables import OVER_SUMMED, PARTS, PLANS, PREDICTIONS, RESIDENT, RUNS, missed, text_of
from common import environment, environment_line, write_results
from resident import ALLOCATOR, measure_resident, unavailable

METHOD = (
    "Peaks are live tensor bytes: predicted on fake tensors before anything is allocated, and measured in "
    "real steps, after the first one, with random weights and images. Resident sets: a fresh process, a "
    "small step, free memory given back, then the peak of the process over one step less what it had before. "
    "FLOPs: of matrix products, convolutions and attention. Two processes at a time, one thread each; "
    "planning alone."
)
LIBRARIES = ("timm", "torchvision")
ALL, FEW = "+experiment=all_tasks", "+experiment=all_tasks batch_size=8"
SWIN, VIT = "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"
TIMM = {"resnet18": 128, VIT: 224, "convnext_atto": 128, SWIN: 112}  # with the height of the images

Job = tuple[str, list[Any]]  # the part that it belongs to, and what to call that part's function with


def configs() -> list[str]:
    """Options that compose every task, trunk, optimizer and experiment that ships."""
    from mtaccum.config import config_dir, group_options  # which takes a while

    tasks = group_options("tasks")
    every = f"+tasks=[{','.join(tasks)}]"
    lines = [f"+tasks=[{task}]" for task in tasks]
    lines += [f"{every} {group}={name}" for group in ("trunk", "optimizer") for name in group_options(group)]
    for name in group_options("experiment"):
        own_tasks = "/tasks" in (config_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        lines.append(f"+experiment={name}" if own_tasks else f"+experiment={name} {every}")
    return lines


def all_jobs() -> list[list[Job]]:
    """What each process measures."""
    dense = Spec("dense", "8", 8, 128)
    specs = [Spec("config", line) for line in configs()]
    specs += [Spec("timm", name, 8, pixels) for name, pixels in TIMM.items()] + [dense]
    jobs: list[Job] = [(PREDICTIONS, [spec]) for spec in specs]
    large, ways = dense._replace(samples=16), (("summed", False, 1), ("split", False, 1), ("split", True, 1))
    jobs += [(RESIDENT, [large, *way]) for way in (*ways[:1], ("sequential", False, 1), *ways[1:])]
    of_timm = [Spec("timm", name, 32 if name == "convnext_atto" else 16, 224) for name in TIMM]
    jobs += [(RESIDENT, [spec, *way]) for spec in of_timm for way in ways]
    jobs += [(RESIDENT, [of_timm[0]._replace(samples=64), "split", False, 4])]
    jobs += [(RESIDENT, [Spec("deeplab", "3", 4, 144), *way]) for way in ways]
    jobs += [(RESIDENT, [Spec("config", ALL), *way]) for way in ways]
    budgets: list[tuple[Spec, str, float]] = [
        (Spec("config", ALL), OF_CONFIG, 0.5),
        (Spec("config", f"{ALL} optimizer=sgd"), OF_CONFIG, 0.2),
        (Spec("config", f"{ALL} trunk=none"), OF_CONFIG, 0.7),
        *((Spec("timm", "resnet18", 8, 128), name, part) for name, part in ((ADAMW, 0.3), (SGDM, 0.6))),
        (Spec("timm", VIT, 8, 224), ADAMW, 0.5),
        (Spec("timm", "convnext_atto", 8, 128), ADAMW, 0.1),
        (Spec("timm", SWIN, 8, 112), SGDM, 0.4),
        *((dense, name, part) for name, part in ((ADAMW, 0.5), (SGDM, 0.1))),
    ]
    jobs += [(RUNS, list(budget)) for budget in budgets]
    jobs += [(PLANS, [Spec("deeplab", heads, 8, 288), OVER_SUMMED]) for heads in ("3", "5")]
    return [[job] for job in jobs]


def quick_jobs() -> list[list[Job]]:
    """A little of each part, in few processes."""
    dense, small = Spec("dense", "8", 8, 128), Spec("timm", "resnet18", 8, 64)
    return [
        [
            (PREDICTIONS, [Spec("config", FEW)]),
            (RUNS, [dense._replace(name="4", pixels=32), ADAMW, 0.5]),
            (RUNS, [small, SGDM, 0.5]),
        ],
        [(RESIDENT, [dense, "summed", False, 1])],
        [(PLANS, [dense, OVER_SUMMED])],
    ]


def run_job(part: str, arguments: list[Any]) -> dict[str, Any]:
    """The rows of a job, or why there are none."""
    functions: dict[str, Callable[..., Any]] = {
        PREDICTIONS: measure_predictions,
        RESIDENT: measure_resident,
        RUNS: plan_and_run,
        PLANS: find_plan_of,
    }
    spec = Spec(*arguments[0])
    reason = unavailable() if part == RESIDENT else None
    if reason is None:
        try:
            rows = functions[part](spec, *arguments[1:])
            return {"part": part, "rows": rows if isinstance(rows, list) else [rows]}
        except ImportError as error:
            if spec.library is None or spec.library not in str(error):
                raise
            reason = str(error)
    return {"part": part, "rows": [], "skipped": f"{part} of {spec.title}: skipped, {reason}"}


def in_process(jobs: list[Job]) -> list[dict[str, Any]]:
    """Run jobs in a new process, and return what it prints as JSON in its last line."""
    names = [f"{part} of {arguments[0].title} ..." for part, arguments in jobs]
    print("\n".join(names), flush=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # two at a time; bytes don't depend on threads
    if any(part == RESIDENT for part, _ in jobs):
        variables |= ALLOCATOR
    command = [sys.executable, __file__, "--jobs", json.dumps(jobs)]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {names} failed; see above.")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for result in found:
        if "skipped" in result:
            print(result["skipped"], flush=True)
    return found


def measure_all(quick: bool) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The rows of each part, and what was skipped."""
    listed = quick_jobs() if quick else all_jobs()
    # how long planning takes is to be seen without another process beside it
    alone = [] if quick else [jobs for jobs in listed if jobs[0][0] == PLANS]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        found = [*pool.map(in_process, [jobs for jobs in listed if jobs not in alone])]
    results = [result for group in (*found, *map(in_process, alone)) for result in group]
    rows = {part: [row for r in results if r["part"] == part for row in r["rows"]] for part in PARTS}
    return rows, list(dict.fromkeys(result["skipped"] for result in results if "skipped" in result))


def facts_of(arguments: list[str]) -> dict[str, Any]:
    """``environment``, with the versions of the libraries that lend models."""
    facts = environment("cpu", arguments)
    for library in LIBRARIES:
        try:
            facts["versions"][library] = version(library)
        except PackageNotFoundError:
            facts["versions"][library] = "not installed"
    return facts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description="Predicted and planned memory against the real one, on the CPU."
    )
    parser.add_argument("--quick", action="store_true", help="few and small models")
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder, help="folder for tables and numbers")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)  # for the processes that this one starts
    options = parser.parse_args()
    if options.jobs:
        print("\n" + json.dumps([run_job(part, arguments) for part, arguments in json.loads(options.jobs)]))
        return
    started = time.monotonic()
    rows, skipped = measure_all(options.quick)
    facts = facts_of(["--quick"] if options.quick else [])
    misses = missed(rows)
    verdict = [f"- missed: {miss}" for miss in misses] or ["All that has a mark reaches it."]
    words = "\n".join([*verdict, *(f"- {reason}" for reason in skipped)])
    libraries = ", ".join(f"{library} {facts['versions'][library]}" for library in LIBRARIES)
    text = f"{text_of(rows)}\n\n{words}\n\n{METHOD}\n\n{environment_line(facts)}; {libraries}"
    print(f"\n{text}")
    elapsed_s = time.monotonic() - started
    results = {"environment": facts, "method": METHOD, "elapsed_s": elapsed_s, **rows}
    results |= {"skipped": skipped, "missed": misses}
    write_results(
        options.output, "planner_accuracy", f"# Accuracy of predictions and plans\n\n{text}", results
    )


if __name__ == "__main__":
    main()
