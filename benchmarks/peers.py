"""Other ways to the gradients of eight losses: ``python benchmarks/peers.py``.

The same model and batch by hand, by TorchJD, Lightning, Accelerate and mtaccum: peak memory in a fresh
process each, the gradients compared with those of the summed losses by hand, and the time over that loop's,
taken in turns. A library that isn't installed is left out, and said to be. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from common import (
    MIB,
    Ratio,
    check_device,
    environment,
    environment_line,
    markdown_table,
    write_results,
)
from peer_measures import measure
from peer_steps import BASELINE, PEERS

METHOD = (
    "Activation peak: the most bytes alive at once during forward and backward, less what was alive before "
    "(parameters, buffers, gradients, inputs, targets). Gradients exist and are added to. Differences: of "
    "the gradients (float32), greatest over the nodes, relative to the norm of the node's gradient by hand "
    "after the same two steps; of BatchNorm's running statistics likewise, by layer. Time: forward and "
    "backward, in turns with the losses summed by hand in the same process; median of ratios and 95 % "
    "bootstrap interval."
)
EXACT = 1e-5  # rounding of float32 is well below, a task or a step too many or too few well above
Job = tuple[str, str]  # what is measured, and the peer


def batches_of_jobs(quick: bool) -> list[list[Job]]:
    """What each process measures. With ``quick`` there is one for each library, for all of it."""
    if not quick:
        return [[("memory", peer)] for peer in PEERS]
    by_library = sorted(PEERS, key=lambda peer: PEERS[peer].library or "")
    return [
        [(kind, peer) for peer in peers for kind in ("memory", "times")]
        for peers in (list(group) for _, group in groupby(by_library, lambda peer: PEERS[peer].library))
    ]


def in_process(jobs: list[Job], options: argparse.Namespace, reference: Path) -> list[dict[str, Any]]:
    """Measure in a new process, and return what it prints as JSON in its last line."""
    for kind, peer in jobs:
        print(f"{kind} of {PEERS[peer].title} ...", flush=True)
    hidden = ["--jobs", json.dumps(jobs), "--reference", str(reference)]
    command = [sys.executable, __file__, *hidden, "--device", options.device]
    variables = dict(os.environ)
    if options.device == "cpu" and any(kind == "memory" for kind, _ in jobs):
        variables["OMP_NUM_THREADS"] = "1"  # two of them at a time; tensor bytes don't depend on threads
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: measuring {jobs} failed; see above.")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    skipped = {row["peer"]: row["skipped"] for row in found if "skipped" in row}
    for peer, reason in skipped.items():
        print(f"{PEERS[peer].title}: skipped, {reason}", flush=True)
    return found


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each peer."""
    rows = {peer: {"peer": peer, "title": value.title} for peer, value in PEERS.items()}

    def add(found: list[dict[str, Any]]) -> None:
        for measured in found:
            rows[measured["peer"]].update(measured)

    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.pt"
        first, *others = batches_of_jobs(options.quick)
        add(in_process(first, options, reference))  # it writes what the others are compared with
        workers = min(2, os.cpu_count() or 1) if options.device == "cpu" else 1
        with ThreadPoolExecutor(workers) as pool:
            for found in pool.map(lambda jobs: in_process(jobs, options, reference), others):
                add(found)
        if not options.quick:
            for peer, row in rows.items():
                if peer != BASELINE and "skipped" not in row:
                    add(in_process([("times", peer)], options, reference))
    return list(rows.values())


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = (
        "8 dense heads",
        "activation peak, MiB",
        "over by hand",
        "total peak, MiB",
        "gradients differ by",
        "statistics differ by",
        "time over by hand",
    )
    baseline = next(row["activation_bytes"] for row in rows if row["peer"] == BASELINE)
    return markdown_table(head, [_cells(row, baseline) for row in rows])


def _cells(row: dict[str, Any], baseline_bytes: int) -> list[str]:
    if "skipped" in row:
        return [row["title"], "skipped", *[""] * 5]
    by_hand = row["peer"] == BASELINE
    return [
        row["title"],
        f"{row['activation_bytes'] / MIB:.1f}",
        f"{row['activation_bytes'] / baseline_bytes:.3f}",
        f"{row['peak_bytes'] / MIB:.1f}",
        "" if by_hand else _short(row["gradient_difference"]),
        "" if by_hand else _short(row["statistics_difference"]),
        "1" if by_hand else str(Ratio(**row["time_over_baseline"])),
    ]


def _short(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def findings(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What has to be said of a row beyond its numbers, if anything."""
    for row in rows:
        title = row["title"]
        if "skipped" in row:
            yield f"{title}: skipped, {row['skipped']} (`pip install -e '.[peers]'` installs it)."
            continue
        if not row["gradient_difference"] <= EXACT:  # NaN too
            yield f"{title}: these are NOT the gradients of the summed losses."
        if not row["gradients_in_place"]:
            yield f"{title}: gradients are new tensors after the step, not those that were there."
        if not row["statistics_difference"] <= EXACT:
            times = row["trunk_statistics_updates"]
            yield f"{title}: NOT BatchNorm's statistics by hand; the trunk's moved {times:g} times in a step."


def versions() -> dict[str, str]:
    """Versions of the libraries that are compared."""
    found = {}
    for library in dict.fromkeys(peer.library for peer in PEERS.values() if peer.library):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; ``--jobs`` and ``--reference`` are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description="Memory, gradients and time of other ways to train heads.")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--quick", action="store_true", help="a smaller model, few processes, little timing")
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder, help="folder for table and numbers")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """The command."""
    options = parse(sys.argv[1:])
    device = check_device(options.device)
    if options.jobs:
        jobs: list[Job] = json.loads(options.jobs)
        found = [measure(kind, peer, device, options.quick, options.reference) for kind, peer in jobs]
        print(f"\n{json.dumps(found)}")
        return
    started = time.monotonic()
    rows = measure_all(options)
    facts = environment(
        device, [*(["--device", device] if device != "cpu" else []), *["--quick"] * options.quick]
    )
    facts["versions"].update(versions())
    libraries = ", ".join(f"{name} {number}" for name, number in versions().items())
    apart = "All of a library in one" if options.quick else "Each peak in a"
    method = f"Method: {rows[0]['method']}, tracked in a step of their own. {apart} fresh process. {METHOD}"
    said = "\n".join(f"- {finding}" for finding in findings(rows))
    parts = [table_of(rows), said, method, f"{environment_line(facts)}; {libraries}"]
    body = "\n\n".join(part for part in parts if part)
    print(f"\n{body}")
    results = {"environment": facts, "method": method, "elapsed_s": time.monotonic() - started, "rows": rows}
    write_results(options.output, "peers", f"# Peers\n\n{body}", results)


if __name__ == "__main__":
    main()
