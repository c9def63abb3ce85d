"""Pictures of memory: the bytes alive over one step, stacked by kind, with its stages marked.

Needs matplotlib (``pip install 'mtaccum[plot]'``), which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtaccum.memory.ledger import KINDS
from mtaccum.memory.tracker import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
# Okabe and Ito (2008), which people with any colour vision can tell apart; what is always there in greys.
_COLORS = ("#5a5a5a", "#009e73", "#9a9a9a", "#c8c8c8", "#e69f00", "#0072b2", "#cc79a7")
_SEEN = 0.002  # changes of less than this part of the peak only stretch the picture
_LABELLED = 0.06  # stages of at least this part of a wide panel have their names written


def draw_timelines(
    timelines: Mapping[str, Sequence[Moment]], *, width: float = 9.0, title: str | None = None
) -> Figure:
    """Steps one above the other at one scale.

    Args:
        timelines: by title, as of ``PeakReport.timeline`` or ``Prediction.timeline``.
        width: of the figure, in inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(width, 0.9 + 1.9 * len(timelines)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    draw_panels(dict(zip(timelines, panels, strict=True)), timelines)
    panels[len(panels) // 2].set_ylabel("live tensor bytes (MiB)")
    panels[-1].set_xlabel("operations that allocate or free, in order, over one step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def draw_panels(
    panels: Mapping[str, Axes], timelines: Mapping[str, Sequence[Moment]], labelled: float = _LABELLED
) -> None:
    """Each timeline on the axes of the same name, all at one scale.

    Args:
        labelled: stages of at least this part of the panel's width have their names written.
    """
    top = 1.32 * max(moment.live_bytes for moments in timelines.values() for moment in moments) / MIB
    for name, axes in panels.items():
        _draw(axes, timelines[name], top, labelled)
        axes.set_title(name, loc="left", fontsize=10)


def pixels_of(figure: Figure) -> Tensor:
    """A figure as a uint8 picture (3, height, width)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    width, height = canvas.get_width_height()
    return pixels.reshape(height, width, 4)[:, :, :3].permute(2, 0, 1).contiguous()


def _draw(axes: Any, moments: Sequence[Moment], top: float, labelled: float) -> None:
    peak = max(moment.live_bytes for moment in moments)
    shown = list(_telling(moments, _SEEN * peak))
    layers = [[moment.by_kind[kind] / MIB for moment in shown] for kind in range(len(KINDS))]
    axes.stackplot(range(len(shown)), layers, labels=KINDS, colors=_COLORS, step="post", linewidth=0)
    axes.axhline(peak / MIB, color="#d55e00", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {peak / MIB:.1f} MiB",
        (0.997, peak / MIB),
        xycoords=axes.get_yaxis_transform(),  # x in parts of the panel, y in MiB
        textcoords="offset points",
        xytext=(0, 2),
        ha="right",
        fontsize=8,
        color="#d55e00",
    )
    _mark_stages(axes, [moment.stage for moment in shown], top, labelled)
    axes.set_xlim(0, max(1, len(shown) - 1))
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)


def _mark_stages(axes: Any, stages: Sequence[str], top: float, labelled: float) -> None:
    """A line where a stage begins, and its name where there is room."""
    start = 0
    for stage, run in groupby(stages):
        length = len(list(run))
        if stage:
            axes.axvline(start, color="black", linewidth=0.4, alpha=0.35)
            if length >= labelled * len(stages):
                node, _, phase = stage.rpartition(" ")
                axes.text(
                    start + length / 2, 0.985 * top, f"{node}\n{phase}", ha="center", va="top", fontsize=7
                )
        start += length


def _telling(moments: Sequence[Moment], change_bytes: float) -> Iterator[Moment]:
    """The moments at which the bytes alive change visibly, or another stage begins."""
    last: Moment | None = None
    for moment in moments:
        if last is None or moment.stage != last.stage or _differ(moment, last) > change_bytes:
            yield moment
            last = moment


def _differ(one: Moment, other: Moment) -> int:
    return max(abs(a - b) for a, b in zip(one.by_kind, other.by_kind, strict=True))
