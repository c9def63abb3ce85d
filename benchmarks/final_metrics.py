"""Train the shipped tasks under every schedule and several seeds, and compare their final metrics.

    python benchmarks/final_metrics.py

The schedules compute the same gradients up to rounding, which training then magnifies; so their final
metrics must lie within the spread that another seed causes. Each training is the command as typed, in
a process of its own. Writes ``final_metrics.md`` and ``final_metrics.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import environment, environment_line, markdown_table, write_results

SCHEDULES = ("summed", "sequential", "split")
SEEDS = (0, 1, 2)


def train(tasks: str, schedule: str, seed: int, extra: list[str], folder: Path) -> dict[str, Any]:
    """The summary of one training, with the losses of its first step."""
    run = folder / f"{schedule}-{seed}"
    command = [
        sys.executable,
        "-m",
        "mtaccum.train",
        f"+tasks=[{tasks}]",
        f"engine={schedule}",
        f"seed={seed}",
    ]
    subprocess.run(
        [*command, "trainer.log_every=1", f"hydra.run.dir={run}", *extra],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    with (run / "metrics.jsonl").open() as lines:
        first = json.loads(next(lines))
    summary["first_losses"] = {name: first[name] for name in first if name.startswith("loss/")}
    return summary


def metrics_of(summary: dict[str, Any]) -> dict[str, float]:
    """Final validation metrics by ``task/metric``."""
    return {
        f"{task}/{name}": value for task, values in summary["tasks"].items() for name, value in values.items()
    }


def table_of(runs: dict[str, dict[str, Any]]) -> str:
    """The summaries of the runs, by name, as a Markdown table."""
    names = sorted(metrics_of(next(iter(runs.values()))))
    rows = [
        [run, *(f"{metrics_of(summary)[name]:.4f}" for name in names), f"{summary['elapsed_s']:.0f}"]
        for run, summary in runs.items()
    ]
    return markdown_table(["run", *names, "elapsed (s)"], rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="seg,cls")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("overrides", nargs="*", help="further overrides of the training")
    arguments = parser.parse_args()
    runs = [(schedule, seed) for seed in SEEDS for schedule in SCHEDULES]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            f"{schedule}, seed {seed}": train(
                arguments.tasks, schedule, seed, arguments.overrides, Path(folder)
            )
            for schedule, seed in runs
        }
    table = table_of(found)
    base = found["split, seed 0"]["first_losses"]
    first = max(
        abs(summary["first_losses"][name] - base[name])
        for run, summary in found.items()
        if run.endswith("seed 0")
        for name in base
    )
    facts = environment("cpu", [f"--tasks={arguments.tasks}", *arguments.overrides])
    difference = f"Largest difference of a first-step loss between the schedules (seed 0): {first:.1e}"
    text = f"{table}\n\n{difference}\n\n{environment_line(facts)}"
    print(text)
    results = {"environment": facts, "runs": found, "first_loss_difference": first}
    write_results(arguments.output, "final_metrics", text, results)


if __name__ == "__main__":
    main()
