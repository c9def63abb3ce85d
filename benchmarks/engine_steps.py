"""Steps of the engine for ``peak_memory.py``: the trunk recomputed in segments, a batch in K micro-batches.

Whole optimizer steps by the engine's own ``split``, on the dense model with 8 heads and one batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from cases import dense_case
from common import MIB, Ratio, interleaved_times, markdown_table, ratio_of
from torch.optim import SGD

from mtaccum import Engine, InexactWarning, split_batch
from mtaccum.memory import measure_step

__all__ = [
    "STEP_METHOD",
    "WAYS",
    "add_ratios",
    "measure_step_memory",
    "measure_step_times",
    "step_table",
]

HEADS = 8
# The trunk is a Sequential of eight blocks, the first two of which work on twice the resolution and keep more
# than half of the bytes.
SEGMENTS = ("trunk.0", "trunk.1", "trunk[2:8]")
KEPT = "nothing"
# What is recomputed, and K, by name.
WAYS: dict[str, tuple[tuple[str, ...], int]] = {
    **{f"K={number}": ((), number) for number in (1, 2, 4, 8)},
    "trunk": (("trunk",), 1),
    "blocks": (("trunk.*",), 1),
    "segments": (SEGMENTS, 1),
    "segments, K=4": (SEGMENTS, 4),
}
BASELINE = "K=1"
ROUNDS, QUICK_ROUNDS = 7, 3
STEP_METHOD = (
    "Steps: 8 dense heads, the same batch, whole steps of the engine by split (SGD with momentum), once the "
    "optimizer has its state. Activations: what is alive at the peak besides parameters, gradients, the "
    "optimizer's state and the batch. Time without tracking, in turns, over K=1 with nothing recomputed."
)
_NOT_ACTIVATIONS = ("parameters", "gradients", "optimizer state", "inputs")


Windows = dict[str, tuple[Engine, list[Any]]]


def _windows(device: str, quick: bool) -> Windows:
    """For each way the engine and its window; on one model, optimizer and batch."""
    torch.manual_seed(0)
    case = dense_case(HEADS, device, **({"width": 32, "pixels": 64} if quick else {}))
    optimizer = SGD(case.model.parameters(), lr=1e-4, momentum=0.9)
    return {
        name: (Engine(case.model, optimizer, recompute=segments), split_batch(case.batch, number))
        for name, (segments, number) in WAYS.items()
    }


def measure_step_memory(name: str, device: str, quick: bool) -> dict[str, Any]:
    """Bytes at the peak of a step; for a fresh process."""
    engine, window = _windows(device, quick)[name]
    recompute, number = WAYS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)  # BatchNorm in micro-batches
        engine.step(window)
        report = measure_step(engine, window)[1]
    activations = sum(nbytes for kind, nbytes in report.by_kind.items() if kind not in _NOT_ACTIVATIONS)
    return {
        "way": name,
        "recompute": list(recompute),
        "accumulate": number,
        "activation_bytes": activations,
        "gradient_bytes": report.by_kind["gradients"],
        "start_bytes": report.start_bytes,
        "peak_bytes": report.peak_bytes,
        "stage": report.stage,
    }


def measure_step_times(device: str, quick: bool) -> dict[str, list[float]]:
    """Seconds of whole steps by way, taken in turns."""
    windows = _windows(device, quick)
    steps = {name: partial(engine.step, window) for name, (engine, window) in windows.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        return interleaved_times(steps, QUICK_ROUNDS if quick else ROUNDS, device)


def add_ratios(rows: Sequence[dict[str, Any]], times: Mapping[str, list[float]]) -> None:
    """Memory and time of each way over those of one micro-batch with nothing recomputed."""
    baseline = next(row for row in rows if row["way"] == BASELINE)
    for row in rows:
        row["activation_over_one"] = row["activation_bytes"] / baseline["activation_bytes"]
        row["time_s"] = times[row["way"]]
        row["time_over_one"] = asdict(ratio_of(times[row["way"]], times[BASELINE]))


def step_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; MiB and ratios."""
    head = (
        *("recomputed", "micro-batches (K)", "activations at the peak, MiB", "over K=1", "gradients, MiB"),
        *("total peak, MiB", "time over K=1"),
    )
    cells = [
        (
            ", ".join(row["recompute"]) or KEPT,
            str(row["accumulate"]),
            f"{row['activation_bytes'] / MIB:.1f}",
            f"{row['activation_over_one']:.3f}",
            f"{row['gradient_bytes'] / MIB:.1f}",
            f"{row['peak_bytes'] / MIB:.1f}",
            "1" if row["way"] == BASELINE else str(Ratio(**row["time_over_one"])),
        )
        for row in rows
    ]
    return markdown_table(head, cells)
