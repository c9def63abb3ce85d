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


def plot_peaks(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Activation peak over the number of heads, and of the two other models as bars, as a PNG.

    Args:
        rows: as ``peak_memory.py`` measures them.
    """
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13.5, 4.8), layout="constrained")
        lines, digits, independent = figure.subplots(1, 3, width_ratios=[2.0, 1.05, 1.8])
        _plot_heads(lines, rows)
        shipped = {schedule: _mib(rows, "digits", schedule) for schedule in _BASIC}
        _plot_bars(digits, shipped, "Shipped tasks: seg, cls,\nnumber, depth (32x32 scenes)")
        pair = {schedule: _mib(rows, "independent", schedule) for schedule in _BASIC}
        pair |= {
            f"{which}\nalone": _mib(rows, f"independent-{which}", "split") for which in ("larger", "smaller")
        }
        _plot_bars(independent, pair, "Two independent models,\ntogether and alone")
        figure.suptitle(
            f"Activation memory at the peak of one step ({rows[0]['method']}; parameters and gradients not "
            f"included)",
            fontsize=12.5,
        )
        figure.savefig(path, dpi=150)


def _mib(rows: Sequence[Mapping[str, Any]], case: str, schedule: str) -> float:
    found = [row for row in rows if row["case"] == case and row["schedule"] == schedule]
    return float(found[0]["activation_bytes"]) / MIB


def _plot_heads(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
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
