"""The picture of ``peak_memory.py``; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cases import RECOMPUTED
from common import MIB
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["plot_peaks"]

# Colours of Okabe and Ito (2008), which people with any colour vision can tell apart.
_COLORS = {"summed": "#d55e00", "sequential": "#0072b2", "split": "#009e73", RECOMPUTED: "#8a5a83"}
_MARKERS = {"summed": "o", "sequential": "s", "split": "o", RECOMPUTED: "D"}
_LABELS = {RECOMPUTED: "split,\ntrunk recomputed"}
_BASIC = ("summed", "sequential", "split")
_GREY = "#555555"


Rows = Sequence[Mapping[str, Any]]


def plot_peaks(rows: Rows, step_rows: Rows, path: Path) -> None:
    """Above: activation peak over the number of heads, and of the two other models as bars. Below: memory and
    time of steps against K, and with parts of the trunk recomputed. As a PNG.

    Args:
        rows, step_rows: as ``peak_memory.py`` measures them.
    """
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13.5, 9.2), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
        lines, digits, independent = above.subplots(1, 3, width_ratios=[2.0, 1.05, 1.8])
        memory, time, parts = below.subplots(1, 3, width_ratios=[1.3, 1.3, 2.2])
        kept = [row for row in step_rows if not row["recompute"]]
        _plot_against_k(memory, kept, [row["activation_bytes"] / MIB for row in kept], "{:.1f}")
        memory.set(ylabel="activations at the peak, MiB")
        memory.set_title("8 dense heads by split:\nthe batch in K micro-batches", fontsize=11)
        _plot_against_k(time, kept, [row["time_over_one"]["median"] for row in kept], "{:.2f}")
        time.set(ylabel="time of a step over K=1")
        time.set_title("The time of these steps", fontsize=11)
        _plot_bars(parts, _parts(step_rows), "The same, with parts of the trunk recomputed (MiB)")
        _plot_heads(lines, rows)
        shipped = {schedule: _mib(rows, "digits", schedule) for schedule in _BASIC}
        _plot_bars(digits, shipped, "Shipped tasks: seg, cls,\nnumber, depth (32x32 scenes)")
        pair = {schedule: _mib(rows, "independent", schedule) for schedule in _BASIC}
        pair |= {
            f"{which}\nalone": _mib(rows, f"independent-{which}", "split") for which in ("larger", "smaller")
        }
        _plot_bars(independent, pair, "Two independent models,\ntogether and alone")
        above.suptitle(
            f"Activation memory at the peak of one step ({rows[0]['method']}; parameters and gradients not "
            f"included)",
            fontsize=12.5,
        )
        figure.savefig(path, dpi=150)


def _mib(rows: Rows, case: str, schedule: str) -> float:
    found = [row for row in rows if row["case"] == case and row["schedule"] == schedule]
    return float(found[0]["activation_bytes"]) / MIB


def _plot_against_k(axes: Axes, rows: Rows, values: Sequence[float], form: str) -> None:
    """Values over the number of micro-batches, each with its number."""
    numbers = [row["accumulate"] for row in rows]
    places = range(len(numbers))
    axes.plot(places, values, color=_COLORS["split"], marker="o", markersize=5, linewidth=2, clip_on=False)
    for place, value in zip(places, values, strict=True):
        axes.annotate(form.format(value), (place, value), xytext=(4, 6), textcoords="offset points")
    axes.set(xlim=(-0.2, len(numbers) - 0.6), ylim=(0, max(values) * 1.2))
    axes.set(xlabel="K, micro-batches of a batch")
    axes.set_xticks(places, [str(number) for number in numbers])
    axes.grid(axis="y", alpha=0.3)


def _parts(step_rows: Rows) -> dict[str, float]:
    """Activations in MiB by what is recomputed, in one micro-batch, with the time below the name."""
    bars = {}
    for row in (row for row in step_rows if row["accumulate"] == 1):
        name = ",\n".join(row["recompute"]) or "nothing"
        bars[f"{name}\n(time {row['time_over_one']['median']:.2f})"] = row["activation_bytes"] / MIB
    return bars


def _plot_heads(axes: Axes, rows: Rows) -> None:
    heads = sorted({int(row["case"].split("-")[1]) for row in rows if row["case"].startswith("dense-")})
    last: dict[str, float] = {}
    for schedule, color in _COLORS.items():
        peaks = [_mib(rows, f"dense-{n}", schedule) for n in heads]
        marker, size = _MARKERS[schedule], 7 if schedule == "sequential" else 5
        axes.plot(heads, peaks, color=color, marker=marker, markersize=size, linewidth=2, clip_on=False)
        last[schedule] = peaks[-1]
    top = max(last.values()) * 1.1
    axes.set(xlim=(heads[0] - 0.3, heads[-1]), ylim=(0, top), xticks=heads)
    axes.set(xlabel="heads on one trunk", ylabel="activation peak, MiB")
    axes.set_title("Dense heads on a convolutional trunk", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    edge = 0.0  # where the label below ends: lines that end close to each other would have theirs overlap
    for schedule in sorted(last, key=lambda name: last[name]):
        label = _LABELS.get(schedule, schedule)
        height = 0.06 * top * len(label.splitlines())
        place = max(last[schedule], edge + height / 2)
        edge = place + height / 2
        text = f"{label} {last[schedule]:.1f}"
        # annotations outside of the axes are part of what the layout makes room for
        axes.annotate(
            text,
            (heads[-1], last[schedule]),
            xytext=(heads[-1] + 0.25, place),
            color=_COLORS[schedule],
            va="center",
            annotation_clip=False,
        )


def _plot_bars(axes: Axes, bars: Mapping[str, float], title: str) -> None:
    """A bar for each name, in MiB."""
    colors = [_COLORS.get(name, _GREY) for name in bars]
    drawn = axes.bar(list(bars), list(bars.values()), color=colors, width=0.7)
    axes.bar_label(drawn, fmt="%.1f", padding=2)
    axes.tick_params(axis="x", labelsize=9.5)
    axes.set_ylim(0, max(bars.values()) * 1.1)
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
