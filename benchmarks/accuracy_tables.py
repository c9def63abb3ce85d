"""The tables of ``planner_accuracy.py``, and which of its numbers miss their mark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from common import MIB, markdown_table

__all__ = ["LARGE_BYTES", "PARTS", "missed", "tables_of", "text_of"]

PREDICTIONS, RESIDENT, RUNS, PLANS = PARTS = ("predictions", "resident", "runs", "plans")
LARGE_BYTES = (
    300 * MIB
)  # of activations: below, what a process needs besides tensors shows in its resident set
PREDICTED, OF_RESIDENT = (0.99, 1.01), (0.90, 1.10)
OVER_BUDGET, OVER_SUMMED, FLOPS = 1.01, 0.44, 1.15
SECONDS, PROCESS_BYTES = 30, 2**30

Rows = Sequence[Mapping[str, Any]]
Results = Mapping[str, Rows]


def text_of(results: Results) -> str:
    """All tables with a word on each."""
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in tables_of(results).items())


def tables_of(results: Results) -> dict[str, str]:
    """By title each table, with a word on it below."""
    tables = {
        "Predicted over measured peak": (_predictions(results[PREDICTIONS]), _extremes(results[PREDICTIONS])),
        "Predicted over the resident set of a process": (_resident(results[RESIDENT]), _ON_RESIDENT),
        "Recommended plans, run": (_runs(results[RUNS]), _ON_RUNS),
        "The planner on large models": (_plans(results[PLANS]), _ON_PLANS),
    }
    return {title: f"{table}\n\n{word}" for title, (table, word) in tables.items()}


def missed(results: Results) -> list[str]:
    """What misses its mark, in a sentence each."""
    return [miss for part in PARTS for row in results[part] for miss in _misses(part, row)]


def _misses(part: str, row: Mapping[str, Any]) -> Iterator[str]:
    if part == PREDICTIONS and not PREDICTED[0] <= row["ratio"] <= PREDICTED[1]:
        yield f"predicted over measured {row['ratio']:.4f}: {_name(row)}"
    if part == RESIDENT and _is_large(row) and not OF_RESIDENT[0] <= row["ratio"] <= OF_RESIDENT[1]:
        yield f"predicted over resident set {row['ratio']:.3f}: {_name(row)}"
    if part in (RUNS, PLANS) and row["plan"] is None:
        yield f"no plan was found: {row['model']}"
    elif part == RUNS and row["over_budget"] > OVER_BUDGET:
        yield f"measured over budget {row['over_budget']:.4f}: {row['model']}, {row['optimizer']}"
    elif part == PLANS and (row["peak_over_summed"] > OVER_SUMMED or row["flops_over_summed"] > FLOPS):
        peak, flops = row["peak_over_summed"], row["flops_over_summed"]
        yield f"peak {peak:.3f} and FLOPs {flops:.3f} over summed: {row['model']}"
    if part == PLANS and (row["elapsed_s"] >= SECONDS or row["process_peak_bytes"] >= PROCESS_BYTES):
        used = f"{row['elapsed_s']:.1f} s and {row['process_peak_bytes'] / MIB:.0f} MiB"
        yield f"planning took {used}: {row['model']}"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['optimizer']}, {_way(row)}"


def _way(row: Mapping[str, Any]) -> str:
    recomputed = ", recompute" if row["recompute"] else ""
    return f"{row['schedule']}{recomputed}, K={row['accumulate']}"


def _is_large(row: Mapping[str, Any]) -> bool:
    return bool(row["predicted_bytes"] >= LARGE_BYTES)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4f} to {max(values):.4f}"


def _predictions(rows: Rows) -> str:
    """A line for each model and optimizer."""
    head = (
        *("model", "optimizer", "steps", "measured peak, MiB", "predicted / measured"),
        "the same less the start",
    )
    cells = []
    for (model, optimizer), group in groupby(rows, key=lambda row: (row["model"], row["optimizer"])):
        steps = list(group)
        peaks = [step["measured_bytes"] for step in steps]
        cells.append(
            (
                model,
                optimizer,
                str(len(steps)),
                f"{_mib(min(peaks))} to {_mib(max(peaks))}",
                _range([step["ratio"] for step in steps]),
                _range([step["activation_ratio"] for step in steps]),
            )
        )
    return markdown_table(head, cells, texts=2)


def _extremes(rows: Rows) -> str:
    if not rows:
        return "Nothing was measured."
    least, most = min(rows, key=lambda row: row["ratio"]), max(rows, key=lambda row: row["ratio"])
    equal = sum(row["predicted_bytes"] == row["measured_bytes"] for row in rows)
    return (
        f"Lowest {least['ratio']:.6f} ({_name(least)}), highest {most['ratio']:.6f} ({_name(most)}); equal "
        f"to the byte in {equal} of {len(rows)} steps. To reach: {PREDICTED[0]} to {PREDICTED[1]}. Each "
        f"schedule was run with and without recompute, in one and in four micro-batches."
    )


_ON_RESIDENT = (
    f"Both are peak less start. To reach, from {LARGE_BYTES // MIB} MiB on: {OF_RESIDENT[0]:.2f} to "
    f"{OF_RESIDENT[1]:.2f}. Below that, marked (small), too much of the whole is what a process needs beside "
    f"its tensors: compiled kernels, and their workspaces, such as those of a convolution's backward."
)


def _resident(rows: Rows) -> str:
    head = ("model", "step", "predicted, MiB", "resident set, MiB", "predicted / resident")
    cells = [
        (
            row["model"],
            _way(row),
            _mib(row["predicted_bytes"]),
            _mib(row["resident_bytes"]),
            f"{row['ratio']:.3f}{'' if _is_large(row) else ' (small)'}",
        )
        for row in rows
    ]
    return markdown_table(head, cells, texts=2)


_ON_RUNS = (
    f"Budgets lie between the smallest peak that can be reached and that of split. The measured peak is that "
    f"of a real step's live tensor bytes. To reach: at most {OVER_BUDGET} of the budget."
)


def _runs(rows: Rows) -> str:
    head = (
        *("model", "optimizer", "plan", "smallest, MiB", "split, MiB", "budget, MiB", "measured, MiB"),
        *("measured / budget", "FLOPs / summed"),
    )
    cells = []
    for row in rows:
        bounds = [_mib(row[name]) for name in ("smallest_bytes", "split_bytes", "budget_bytes")]
        measured = (
            ["", "", ""]
            if row["plan"] is None
            else [
                _mib(row["measured_bytes"]),
                f"{row['over_budget']:.4f}",
                f"{row['flops_over_summed']:.3f}",
            ]
        )
        cells.append([row["model"], row["optimizer"], row["plan"] or "none found", *bounds, *measured])
    return markdown_table(head, cells, texts=3)


_ON_PLANS = (
    f"To reach, for a budget of {OVER_SUMMED} of summed's predicted peak: at most that at no more than "
    f"{FLOPS} of its FLOPs, in less than {SECONDS} s and {PROCESS_BYTES // MIB} MiB. Planning time includes "
    f"the prediction of summed; the process's peak is its resident set with all that it has imported."
)


def _plans(rows: Rows) -> str:
    head = (
        *("model", "plan", "summed, MiB", "peak / summed", "FLOPs / summed", "planning, s", "of CPU, s"),
        "process's peak, MiB",
    )
    cells = []
    for row in rows:
        ratios = (
            ["", ""]
            if row["plan"] is None
            else [f"{row['peak_over_summed']:.3f}", f"{row['flops_over_summed']:.3f}"]
        )
        used = [f"{row['elapsed_s']:.1f}", f"{row['cpu_s']:.1f}", f"{row['process_peak_bytes'] / MIB:.0f}"]
        cells.append([row["model"], row["plan"] or "none found", _mib(row["summed_bytes"]), *ratios, *used])
    return markdown_table(head, cells, texts=2)
