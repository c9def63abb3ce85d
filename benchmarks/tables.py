"""The tables of README.md and docs/benchmarks.md, made from the results that are committed.

    python benchmarks/tables.py                            # from docs/results
    python benchmarks/tables.py --take benchmarks/results  # after measuring: take these results over first

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``, with a line below that says how
it was measured. What another run would change is never typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accuracy_tables
import ddp
import final_metrics
import peak_memory
import peers
import step_time
from cases import RECOMPUTED
from common import MIB, markdown_table
from engine_steps import step_table

__all__ = ["NAMES", "PAGES", "RESULTS", "filled", "is_look", "read"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
PICTURES = {"peak_memory.png": ROOT / "docs" / "images" / "peak_memory.png"}
NAMES = ("peak_memory", "step_time", "planner_accuracy", "peers", "ddp", "final_metrics")

Results = Mapping[str, Any]
_PLACE = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What a benchmark has written."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def is_look(results: Results) -> bool:
    """Whether results are of a short run that shows only that a benchmark runs."""
    command = results["environment"]["command"]
    return "--quick" in command or "trainer.max_steps" in command


def compare(results: Results) -> str:
    """The dense heads alone: MiB, and the time over summed."""
    rows = {(row["case"], row["schedule"]): row for row in results["rows"]}
    heads = sorted({int(case.split("-")[1]) for case, _ in rows if case.startswith("dense-")})
    schedules = ("summed", "sequential", "split", RECOMPUTED)
    cells = [
        [str(number), *(_peak_and_time(rows[f"dense-{number}", schedule]) for schedule in schedules)]
        for number in heads
    ]
    return markdown_table(["heads", *(f"`{name}`" for name in schedules)], cells, texts=0)


def _peak_and_time(row: Mapping[str, Any]) -> str:
    peak = f"{row['activation_bytes'] / MIB:.1f} MiB"
    if row["schedule"] == "summed" or "time_over_summed" not in row:  # a look times one model only
        return peak
    return f"{peak} ({row['time_over_summed']['median']:.2f})"


def _accuracy(title: str) -> Callable[[Results], str]:
    return lambda results: accuracy_tables.tables_of(results)[title]


def _step_times(results: Results) -> str:
    return f"{step_time.table_of(results['rows'])}\n\n{step_time.peaks_of(results['rows'])}"


def _peers(results: Results) -> str:
    said = "\n".join(f"- {finding}" for finding in peers.findings(results["rows"]))
    return "\n\n".join(part for part in (peers.table_of(results["rows"]), said) if part)


def _metrics(results: Results) -> str:
    difference = (
        f"Largest difference of a first loss between schedules: {results['first_loss_difference']:.1e}."
    )
    return f"{final_metrics.table_of(results['runs'])}\n\n{difference}"


# By name the results that a table is made of, and how.
TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "compare": ("peak_memory", compare),
    "peak-memory": ("peak_memory", lambda results: peak_memory.table_of(results["rows"])),
    "steps": ("peak_memory", lambda results: step_table(results["step_rows"])),
    "step-time": ("step_time", _step_times),
    "predictions": ("planner_accuracy", _accuracy("Predicted over measured peak")),
    "resident": ("planner_accuracy", _accuracy("Predicted over the resident set of a process")),
    "plans-run": ("planner_accuracy", _accuracy("Recommended plans, run")),
    "large-models": ("planner_accuracy", _accuracy("The planner on large models")),
    "peers": ("peers", _peers),
    "reduced-bytes": ("ddp", lambda results: ddp.bytes_table(results["bytes"])),
    "ranks-time": ("ddp", lambda results: ddp.time_table(results["rows"])),
    "final-metrics": ("final_metrics", _metrics),
}


def caption(results: Results) -> str:
    """How a table was measured, in a line."""
    facts = results["environment"]
    hardware, threads = facts["hardware"], facts["threads"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    took = f", {results['elapsed_s']:.0f} s" if "elapsed_s" in results else ""
    line = (
        f"`{facts['command']}`, {facts['date']}{took}; {hardware['cpu_cores']} CPU cores, "
        f"{hardware['memory_gib']} GiB, {hardware['gpu'] or 'no GPU'}, threads: {threads}; {versions}."
    )
    return f"**A look at small models, not a measurement.** {line}" if is_look(results) else line


def filled(text: str, folder: Path = RESULTS) -> str:
    """A page's text with each of its tables made anew.

    Raises:
        KeyError: a table that isn't known.
    """

    def table(found: re.Match[str]) -> str:
        name, make = TABLES[found[1]]
        results = read(name, folder)
        body = f"{make(results)}\n\n{caption(results)}"
        return f"<!-- table: {found[1]} -->\n{body}\n<!-- end of table -->"

    return _PLACE.sub(table, text)


def take(folder: Path) -> None:
    """Take over the results in a folder, and the pictures beside them.

    A short run's are refused: they aren't measurements.
    """
    found = [name for name in NAMES if (folder / f"{name}.json").is_file()]
    if looks := [name for name in found if is_look(read(name, folder))]:
        sys.exit(f"error: {', '.join(looks)} in {folder}: a look, not a measurement. Run it in full.")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in found:
        shutil.copyfile(folder / f"{name}.json", RESULTS / f"{name}.json")
    for name, place in PICTURES.items():
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place)
    print(f"taken: {', '.join(found) or 'nothing'}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Make the tables of README.md and docs/benchmarks.md.")
    parser.add_argument(
        "--take", type=Path, help="take the results in this folder over into docs/results first"
    )
    options = parser.parse_args()
    if options.take is not None:
        take(options.take)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
