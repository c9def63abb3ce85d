"""Host time of a step in two revisions, whose processes run blocks of steps in turn."""

from __future__ import annotations

import importlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from common import Ratio, markdown_table

from revisions.run import Side, start

__all__ = ["compare_times", "serve"]

# schedule, K, and what is recomputed
STEPS: dict[str, tuple[str, int, list[str]]] = {
    "summed, K=1": ("summed", 1, []),
    "sequential, K=1": ("sequential", 1, []),
    "split, K=1": ("split", 1, []),
    "split, K=3": ("split", 3, []),
    "split, K=3, trunk recomputed": ("split", 3, ["trunk"]),
}
_RESAMPLES = 2000


def serve() -> None:
    """The worker's part: for each line, the name of a case and a number of steps, the seconds of each."""
    steps: dict[str, Any] = {}
    for line in sys.stdin:
        name, number = json.loads(line)
        if name not in steps:
            steps[name] = _step(*STEPS[name])
        times = []
        for _ in range(number):
            start = time.perf_counter()
            steps[name]()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


def _step(schedule: str, accumulate: int, recompute: list[str]) -> Any:
    """A step of the awkward tree, which is so small that what is timed is what the engine does itself."""
    cases, names = (importlib.import_module(f"revisions.{name}") for name in ("option_cases", "names"))
    model = cases.awkward_model()
    options = {"schedule": schedule, "recompute": recompute}
    engine = names.make_engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), options)
    window = cases.awkward_batches((4, 3, 5)[:accumulate])
    return lambda: engine.step(window)


def compare_times(sides: Sequence[Side], rounds: int, steps: int = 10) -> str:
    """A table of ratios, head over base, of the medians of all steps.

    Args:
        rounds: of one block of each revision, in an order drawn anew.
        steps: of a block.
    """
    pipe = subprocess.PIPE
    workers = {side.name: start(side, "times", stdin=pipe, stdout=pipe) for side in sides}
    try:
        rows = [_row(case, workers, rounds, steps) for case in STEPS]
    finally:
        for worker in workers.values():
            worker.kill()
    head = ["host time of a step", "base, ms", "head, ms", "head over base"]
    return markdown_table(head, rows)


def _row(case: str, workers: Mapping[str, Any], rounds: int, steps: int) -> tuple[str, ...]:
    order = random.Random(0)
    blocks: dict[str, list[list[float]]] = {name: [] for name in workers}
    for number in range(rounds + 1):
        for name in order.sample(list(workers), len(workers)):
            print(json.dumps([case, steps]), file=workers[name].stdin, flush=True)
            block = json.loads(workers[name].stdout.readline())
            if number:  # the first one warms up
                blocks[name].append(block)
    base, head = (_median_ms(blocks[name]) for name in ("base", "head"))
    return case, f"{base:.2f}", f"{head:.2f}", str(ratio_of_medians(blocks["head"], blocks["base"]))


def _median_ms(blocks: Sequence[Sequence[float]]) -> float:
    return 1e3 * statistics.median([seconds for block in blocks for seconds in block])


def ratio_of_medians(times: Sequence[Sequence[float]], over: Sequence[Sequence[float]]) -> Ratio:
    """The ratio of the medians of all steps of two lists of blocks, in seconds.

    The interval is the percentile bootstrap (Efron 1979): rounds, of a block of each, drawn with replacement.
    """
    ours, theirs = np.asarray(times), np.asarray(over)
    drawn = np.random.default_rng(0).integers(len(ours), size=(_RESAMPLES, len(ours)))
    ratios = [np.median(ours[rounds]) / np.median(theirs[rounds]) for rounds in drawn]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(ours) / np.median(theirs)), float(low), float(high), len(ours))
