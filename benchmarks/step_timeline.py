"""Draw the live tensor bytes over one step, for each schedule: the picture in the README.

    python benchmarks/step_timeline.py --output docs/images/step_timeline.png

Needs matplotlib (``pip install 'mtaccum[plot]'``). The model is that of ``peak_memory.py`` with four heads;
gradients exist already, and what is alive at the start (parameters, gradients, inputs, targets) is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from models import dense_model
from torch import Tensor, nn

from mtaccum.engine.schedules import SCHEDULES, Node
from mtaccum.memory import LiveBytes

MIB = 2**20
HEADS, CLASSES = 4, 13


def timeline(schedule: str) -> list[float]:
    """Live MiB after each op of one step, above what was alive at its start."""
    torch.manual_seed(0)
    trunk, heads = dense_model(HEADS)
    image = torch.randn(8, 3, 128, 128)
    targets = [torch.randint(CLASSES, (8, 128, 128)) for _ in heads]

    def loss_of(head: nn.Module, target: Tensor) -> Callable[..., Tensor]:
        return lambda features: F.cross_entropy(head(features["trunk"]), target)

    leaves = tuple(
        Node(f"head {index}", loss_of(head, target))
        for index, (head, target) in enumerate(zip(heads, targets, strict=True))
    )
    root = Node("trunk", lambda _: trunk(image), leaves, module=trunk)

    def step() -> None:
        SCHEDULES[schedule]([root], {}, Tensor.backward)

    step()  # makes the gradients
    modules = nn.ModuleList([trunk, *heads])
    with LiveBytes([modules, image, *targets], timeline=True) as live:
        start = live.current_bytes
        step()
    levels = [(live_bytes - start) / MIB for _, live_bytes in live.timeline]
    # ops that change nothing visible (views, small buffers) would only stretch the picture
    return [new for old, new in pairwise([-1.0, *levels]) if abs(new - old) > 0.05]


def draw(path: Path) -> None:
    """Three panels, one above the other, at one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    what = {
        "summed": "all heads forward, then one backward: a staircase",
        "sequential": "each task's whole path, one after the other: equal humps, one trunk pass each",
        "split": "one trunk pass; each head forward and backward on it: a plateau with small humps",
    }
    lines = {schedule: timeline(schedule) for schedule in what}
    top = max(map(max, lines.values())) * 1.15
    figure, panels = plt.subplots(3, 1, figsize=(8, 6.5), sharey=True, constrained_layout=True)
    for panel, (schedule, explanation) in zip(panels, what.items(), strict=True):
        line = lines[schedule]
        peak = max(line)
        panel.fill_between(range(len(line)), line, step="post", color="#4477aa", alpha=0.35, linewidth=0)
        panel.plot(line, drawstyle="steps-post", color="#4477aa", linewidth=1.2)
        panel.axhline(peak, color="#bb5566", linewidth=0.8, linestyle="--")
        panel.annotate(
            f"peak {peak:.0f} MiB",
            (0.995, peak),
            xycoords=panel.get_yaxis_transform(),  # x in parts of the panel, y in MiB
            textcoords="offset points",
            xytext=(0, 3),
            ha="right",
            color="#bb5566",
        )
        panel.set_title(f"{schedule}: {explanation}", loc="left", fontsize=10)
        panel.set_xlim(0, len(line) - 1)
        panel.set_ylim(0, top)
        panel.set_xticks([])
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylabel("live tensor bytes above those at the start (MiB)")
    panels[-1].set_xlabel("operations that allocate or free, in order, over one step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/images/step_timeline.png"))
    output = parser.parse_args().output
    draw(output)
    print(output)


if __name__ == "__main__":
    main()
