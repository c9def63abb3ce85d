"""Peak memory and time of the schedules: ``python benchmarks/peak_memory.py``.

Memory is measured in a fresh process for each model and schedule; on the CPU it is live tensor bytes, the
same on any machine. Time is measured apart, without the tracker, with the schedules taking turns in one
process per model. A second table is of the engine's steps, with segments of the trunk recomputed and in K
micro-batches. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from cases import RECOMPUTED, build_case
from common import (
    MIB,
    Ratio,
    check_device,
    environment,
    environment_line,
    interleaved_times,
    markdown_table,
    ratio_of,
    write_results,
)
from engine_steps import (
    STEP_METHOD,
    WAYS,
    add_ratios,
    measure_step_memory,
    measure_step_times,
    step_table,
)
from torch import Tensor, nn

from mtaccum.engine import SCHEDULES
from mtaccum.memory import measure_peak

BASELINE = "summed"
METHOD = (
    "Activation peak: the most bytes alive at once during forward and backward of one micro-batch, less what "
    "was alive before (parameters, buffers, gradients, inputs, targets). Gradients exist and are added to, "
    "as after zero_grad(set_to_none=False). Time: forward and backward without tracking, schedules taking "
    "turns in one process, median of ratios and 95 % bootstrap interval."
)
# Rounds of timing for each case: the long steps vary little, and the whole shall take minutes.
ROUNDS = {"dense-1": 4, "dense-2": 3, "dense-4": 3, "dense-8": 5, "digits": 10, "independent": 6}
QUICK_ROUNDS = {"dense-8": 3}
QUICK_HEADS, HEADS = (1, 8), (1, 2, 4, 8)
TITLES = {
    "digits": "shipped tasks: seg, cls, number, depth",
    "independent": "two independent models",
    "independent-larger": "the larger of the two alone",
    "independent-smaller": "the smaller of the two alone",
}


def title_of(case: str) -> str:
    """A case's name for people."""
    kind, _, heads = case.partition("-")
    return f"{heads} dense head{'s' * (heads != '1')}" if kind == "dense" else TITLES[case]


def processes(quick: bool) -> list[list[tuple[str, str]]]:
    """What each process measures: one case and schedule. With ``quick`` there are two processes only."""
    dense = [f"dense-{heads}" for heads in (QUICK_HEADS if quick else HEADS)]
    on_trunk = [(case, schedule) for case in dense for schedule in (*SCHEDULES, RECOMPUTED)]
    others = [(case, schedule) for case in ("digits", "independent") for schedule in SCHEDULES]
    others += [("independent-larger", "split"), ("independent-smaller", "split")]
    return [on_trunk, others] if quick else [[run] for run in (*on_trunk, *others)]


def measure_memory(runs: list[tuple[str, str]], device: str, quick: bool) -> list[dict[str, Any]]:
    """Bytes of one forward and backward of each case by its schedule; for a fresh process."""
    rows = []
    for name, schedule in runs:
        case = build_case(name, device, quick)
        case.make_gradients()
        if device != "cpu":
            # workspaces that libraries keep from their first call on belong to no step
            case.run(schedule)
        existing: list[Tensor | nn.Module] = [case.model, *case.batch.values()]
        report = measure_peak(partial(case.run, schedule), device=device, existing=existing)
        gradients = [p.grad for p in case.model.parameters() if p.grad is not None]
        rows.append(
            {
                "case": name,
                "schedule": schedule,
                "activation_bytes": report.activation_bytes,
                "start_bytes": report.start_bytes,
                "peak_bytes": report.peak_bytes,
                "gradient_bytes": sum(gradient.nbytes for gradient in gradients),
                "method": report.method,
            }
        )
    return rows


def measure_times(runs: list[tuple[str, str]], device: str, quick: bool) -> dict[str, list[float]]:
    """Seconds of forward and backward of one case by schedule, round by round."""
    name = runs[0][0]
    case = build_case(name, device, quick)
    case.make_gradients()
    case.run(BASELINE)  # the first pass is slow; this one takes the most memory, which then is at hand
    steps = {schedule: partial(case.run, schedule) for _, schedule in runs}
    return interleaved_times(steps, (QUICK_ROUNDS if quick else ROUNDS)[name], device, warmups=0)


def in_process(kind: str, runs: Sequence[Any], options: argparse.Namespace) -> Any:
    """Run what a hidden option stands for in a new process, and return what it prints as JSON."""
    hidden = [f"--{kind}", json.dumps(runs)]
    command = [sys.executable, __file__, *hidden, "--device", options.device]
    variables = dict(os.environ)
    if kind.endswith("memory") and options.device == "cpu":
        variables["OMP_NUM_THREADS"] = "1"  # two of them at a time; tensor bytes don't depend on threads
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: measuring the {kind} of {runs} failed; see above.")
    return json.loads(done.stdout)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case and schedule."""
    listed = processes(options.quick)
    print(f"memory, in {len(listed)} fresh processes ...", flush=True)
    workers = min(2, os.cpu_count() or 1) if options.device == "cpu" else 1
    with ThreadPoolExecutor(workers) as pool:
        measured = pool.map(lambda runs: in_process("memory", runs, options), listed)
        rows: list[dict[str, Any]] = [row for rows in measured for row in rows]
    baselines = {row["case"]: row["activation_bytes"] for row in rows if row["schedule"] == BASELINE}
    for row in rows:
        # what is alone has no baseline of its own: it is there to compare the two together with
        baseline = baselines.get(row["case"], baselines["independent"])
        row["activation_over_summed"] = row["activation_bytes"] / baseline
    for name in QUICK_ROUNDS if options.quick else ROUNDS:
        mine = [row for row in rows if row["case"] == name]
        print(f"time of {title_of(name)} ...", flush=True)
        times = in_process("times", [(name, row["schedule"]) for row in mine], options)
        for row in mine:
            row["time_s"] = times[row["schedule"]]
            row["time_over_summed"] = asdict(ratio_of(row["time_s"], times[BASELINE]))
    return rows


def measure_all_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way of running the engine's step."""
    print("steps with segments of the trunk recomputed, and in micro-batches ...", flush=True)
    listed = [list(WAYS)] if options.quick else [[name] for name in WAYS]
    rows = [row for names in listed for row in in_process("step-memory", names, options)]
    add_ratios(rows, in_process("step-times", list(WAYS), options))
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; MiB and ratios."""
    head = ("model", "schedule", "activation peak, MiB", "over summed", "total peak, MiB", "time over summed")
    cells = []
    for row in rows:
        time_ratio = Ratio(**row["time_over_summed"]) if "time_over_summed" in row else None
        baseline = row["schedule"] == BASELINE
        cells.append(
            (
                title_of(row["case"]),
                row["schedule"],
                f"{row['activation_bytes'] / MIB:.1f}",
                f"{row['activation_over_summed']:.3f}",
                f"{row['peak_bytes'] / MIB:.1f}",
                "" if time_ratio is None else "1" if baseline else str(time_ratio),
            )
        )
    return markdown_table(head, cells, texts=2)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; those without help are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description="Peak memory and time of the schedules.")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--quick", action="store_true", help="1 and 8 heads of a smaller model, little timing"
    )
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder, help="folder for tables, numbers and picture")
    for hidden in ("--memory", "--times", "--step-memory", "--step-times"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measured_here(options: argparse.Namespace) -> Any:
    """What a process measures that was started for it; None if it is the user's."""
    device, quick = options.device, options.quick
    if options.memory:
        return measure_memory(json.loads(options.memory), device, quick)
    if options.times:
        return measure_times(json.loads(options.times), device, quick)
    if options.step_memory:
        return [measure_step_memory(name, device, quick) for name in json.loads(options.step_memory)]
    return measure_step_times(device, quick) if options.step_times else None


def main() -> None:
    """The command."""
    options = parse(sys.argv[1:])
    device = check_device(options.device)
    if (measured := measured_here(options)) is not None:
        print(json.dumps(measured))
        return
    started = time.monotonic()
    rows, step_rows = measure_all(options), measure_all_steps(options)
    facts = environment(
        device, [*(["--device", device] if device != "cpu" else []), *["--quick"] * options.quick]
    )
    apart = "Several models in one" if options.quick else "Each peak in a"
    method = f"Method: {rows[0]['method']}, tracked in a step of their own. {apart} fresh process. {METHOD}"
    tables = f"{table_of(rows)}\n\n{step_table(step_rows)}"
    print(f"\n{tables}\n\n{method}\n{STEP_METHOD}\n{environment_line(facts)}")
    text = f"# Peak memory\n\n{tables}\n\n{method}\n\n{STEP_METHOD}\n\n{environment_line(facts)}"
    results = {"environment": facts, "method": method, "elapsed_s": time.monotonic() - started, "rows": rows}
    results |= {"step_method": STEP_METHOD, "step_rows": step_rows}
    write_results(options.output, "peak_memory", text, results)
    try:
        from plot import plot_peaks
    except ImportError:
        print("no picture: it needs matplotlib, pip install 'mtaccum[plot]'")
    else:
        picture = options.output / "peak_memory.png"
        plot_peaks(rows, step_rows, picture)
        print(f"written: {picture}")


if __name__ == "__main__":
    main()
