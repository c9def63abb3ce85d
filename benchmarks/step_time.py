"""Time of steps, as ratios: ``python benchmarks/step_time.py``.

Each ratio is the median over pairs of steps taken right after each other, in random order, so that what else
the machine does slows both. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case, dense_case
from common import (
    MIB,
    check_device,
    environment,
    environment_line,
    interleaved_times,
    markdown_table,
    ratio_of,
    write_results,
)
from models import linear_model
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mtaccum import Classification, Engine, MultiTaskModel, split_backward
from mtaccum.memory import measure_step

METHOD = (
    "Whole steps unless said otherwise: forward, backward, gradient norm, SGD with momentum, gradients "
    "dropped. Median over pairs of steps taken right after each other in random order, with its 95 % "
    "bootstrap interval."
)
LINEAR_HEADS, LINEAR_WIDTH, LINEAR_CLASSES = 8, 1024, 10
LINEAR_BATCH, SMALL_LINEAR_BATCH = 256, 16
ENGINE_HEADS = 3
DENSE, LINEAR = "8 dense heads: split over summed", "8 linear heads: split over summed"
GROUPED = "8 linear heads, grouped: split over summed"
PASSES = "8 linear heads, batch 16, no optimizer: split over summed"
NORM = "3 dense heads: Engine.step over the same by hand, norm logged"
NO_NORM = "3 dense heads: Engine.step over the same by hand, no norm"
REACH = {DENSE: 1.05, NORM: 1.05, GROUPED: 1.05}
Steps = dict[str, Callable[[], object]]


def optimizer_of(case: Case) -> SGD:
    """One for all that is compared: each step then does the same work on the same state."""
    return SGD(case.model.parameters(), lr=1e-4, momentum=0.9)


def linear_case(device: str, batch_size: int) -> Case:
    """8 linear heads on a three-layer perceptron: classification of random vectors (batch_size, 1024)."""
    trunk, modules = linear_model(LINEAR_HEADS, LINEAR_WIDTH, LINEAR_CLASSES)
    heads = {f"head{index}": module for index, module in enumerate(modules)}
    tasks = {name: Classification(LINEAR_CLASSES, head=head, target=name) for name, head in heads.items()}
    batch = {name: torch.randint(0, LINEAR_CLASSES, (batch_size,), device=device) for name in heads}
    batch["image"] = torch.randn(batch_size, LINEAR_WIDTH, device=device)
    return Case(MultiTaskModel(trunk, tasks, inputs="image").to(device), batch)


def engines_of(case: Case) -> dict[str, Engine]:
    """Split, split with all heads as one group, and summed, on one model and optimizer."""
    model, optimizer = case.model, optimizer_of(case)
    return {
        "split": Engine(model, optimizer),
        "grouped": Engine(model, optimizer, head_groups=[list(model.tasks)]),
        "summed": Engine(model, optimizer, schedule="summed"),
    }


def steps_of(engines: Mapping[str, Engine], case: Case) -> Steps:
    """``Engine.step`` of each."""
    return {name: partial(engine.step, [case.batch]) for name, engine in engines.items()}


def engine_steps(case: Case) -> Steps:
    """``Engine.step``, and the same written by hand with and without the gradient norm that it reports."""
    optimizer = optimizer_of(case)
    engine = Engine(case.model, optimizer)
    return {
        "engine": partial(engine.step, [case.batch]),
        "by hand": partial(step_by_hand, case, optimizer, log_norm=True),
        "by hand, no norm": partial(step_by_hand, case, optimizer, log_norm=False),
    }


def step_by_hand(case: Case, optimizer: Optimizer, log_norm: bool) -> dict[str, Tensor]:
    """The split step as people write it: no counting or checking of labels."""
    model, batch = case.model, case.batch
    assert model.trunk is not None
    features = model.trunk(batch["image"])
    cut = features.detach().requires_grad_()
    logged = {}
    for name, task in model.tasks_by_name().items():
        loss = F.cross_entropy(task.head(cut), batch[name])
        loss.backward()  # type: ignore[no-untyped-call]
        logged[name] = loss.detach()
    features.backward(cut.grad)
    if log_norm:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        logged["grad_norm"] = nn.utils.get_total_norm(gradients)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return logged


def pass_steps(case: Case) -> Steps:
    """Forward and backward alone, adding to gradients: ``split_backward``, and the summed losses by hand."""
    model, batch = case.model, case.batch
    trunk = model.trunk
    assert trunk is not None
    case.make_gradients()

    def loss_of(head: nn.Module, labels: Tensor, features: Tensor) -> Tensor:
        return F.cross_entropy(head(features), labels)

    heads = {name: task.head for name, task in model.tasks_by_name().items()}
    losses = {name: partial(loss_of, head, batch[name]) for name, head in heads.items()}

    def split() -> None:
        split_backward(trunk(batch["image"]), losses)

    def summed() -> None:
        features = trunk(batch["image"])
        torch.stack([loss(features) for loss in losses.values()]).sum().backward()  # type: ignore[no-untyped-call]

    return {"split": split, "summed": summed}


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each ratio."""
    device, pairs = options.device, options.pairs
    torch.manual_seed(0)
    many = pairs if options.quick else 10 * pairs
    small = {"width": 32, "pixels": 64, "batch_size": 2}
    # some 50 ms on two cores: the shorter a step, the more the engine's own work shows
    middle = small if options.quick else {"width": 64, "pixels": 64, "batch_size": 8}
    case = dense_case(8, device, **(small if options.quick else {}))
    steps = steps_of(engines_of(case), case)
    del steps["grouped"]  # heads of this size are better not grouped
    rows = compare(steps, pairs, device, {DENSE: ("split", "summed")})
    steps = engine_steps(dense_case(ENGINE_HEADS, device, **middle))
    by_hand = {NORM: ("engine", "by hand"), NO_NORM: ("engine", "by hand, no norm")}
    rows += compare(steps, many, device, by_hand)
    case = linear_case(device, LINEAR_BATCH)
    engines = engines_of(case)
    over_summed = {LINEAR: ("split", "summed"), GROUPED: ("grouped", "summed")}
    rows += compare(steps_of(engines, case), many, device, over_summed)
    add_peaks(rows[-1], engines["grouped"], engines["summed"], case)
    steps = pass_steps(linear_case(device, SMALL_LINEAR_BATCH))
    return rows + compare(steps, many, device, {PASSES: ("split", "summed")})


def compare(
    steps: Steps, rounds: int, device: str, ratios: Mapping[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """Time the steps in turns; a row for each ratio of two of them, with all times in seconds."""
    print(f"{'; '.join(ratios)} ...", flush=True)
    times = interleaved_times(steps, rounds, device, warmups=2)
    return [
        {
            "what": what,
            "ratio": asdict(ratio_of(times[step], times[baseline])),
            "reach": REACH.get(what),
            "times_s": times[step],
            "baseline_times_s": times[baseline],
        }
        for what, (step, baseline) in ratios.items()
    ]


def add_peaks(row: dict[str, Any], engine: Engine, baseline: Engine, case: Case) -> None:
    """Peak memory of a step of each side of a ratio, in bytes."""
    row["peak_bytes"], row["baseline_peak_bytes"] = (
        measure_step(side, [case.batch])[1].peak_bytes for side in (engine, baseline)
    )


def peaks_of(rows: list[dict[str, Any]]) -> str:
    """The peaks that were measured, in a line each."""
    return "\n".join(
        f"Peak memory of a step, {row['what']}: {row['peak_bytes'] / MIB:.2f} MiB over "
        f"{row['baseline_peak_bytes'] / MIB:.2f} MiB."
        for row in rows
        if "peak_bytes" in row
    )


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = ("step time", "median ratio", "95 % interval", "reach", "pairs", "baseline step, ms")
    return markdown_table(
        head,
        [
            (
                row["what"],
                f"{row['ratio']['median']:.3f}",
                f"{row['ratio']['low']:.3f} to {row['ratio']['high']:.3f}",
                "" if row["reach"] is None else f"<= {row['reach']}",
                str(row["ratio"]["rounds"]),
                f"{1e3 * statistics.median(row['baseline_times_s']):.1f}",
            )
            for row in rows
        ],
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Time of steps, as ratios of pairs.")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--pairs", type=int, help="pairs of long steps (default 15; short steps: ten times that)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small models, 3 pairs: a look, not a measurement"
    )
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder, help="folder for table and numbers")
    options = parser.parse_args()
    check_device(options.device)
    arguments = [f for f in ("--quick",) if options.quick]
    arguments += ["--device", options.device] if options.device != "cpu" else []
    arguments += ["--pairs", str(options.pairs)] if options.pairs is not None else []
    options.pairs = options.pairs if options.pairs is not None else 3 if options.quick else 15
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {options.pairs}.")
    started = time.monotonic()
    rows = measure_all(options)
    facts, table = environment(options.device, arguments), f"{table_of(rows)}\n\n{peaks_of(rows)}"
    print(f"\n{table}\n\n{METHOD}\n{environment_line(facts)}")
    text = f"# Step time\n\n{table}\n\n{METHOD}\n\n{environment_line(facts)}"
    results = {"environment": facts, "method": METHOD, "elapsed_s": time.monotonic() - started, "rows": rows}
    write_results(options.output, "step_time", text, results)


if __name__ == "__main__":
    main()
