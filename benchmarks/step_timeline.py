"""Draw the live tensor bytes over one step, for each schedule: the picture in the README.

    python benchmarks/step_timeline.py --output docs/images/step_timeline.png

Needs matplotlib (``pip install 'mtaccum[plot]'``). Each panel is a real step of the engine, measured. On the
left the model of ``peak_memory.py`` with four heads; on the right one whose trunk dominates, where running
the heads one by one saves little, and recomputing parts of the trunk does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from cases import dense_case
from torch import nn

from mtaccum import Engine, MultiTaskModel, Segmentation
from mtaccum.memory import Moment, measure_step
from mtaccum.memory.picture import draw_panels

HEADS, CLASSES = 4, 13

Hows = dict[str, tuple[str, list[str]]]  # by title a schedule, and what is recomputed
DENSE: Hows = {
    "summed: all heads forward, then one backward: a staircase": ("summed", []),
    "sequential: each task's whole path, one after the other: equal humps": ("sequential", []),
    "split: one trunk pass, each head forward and backward on it: a plateau with small humps": ("split", []),
}
BLOCKS = 9
DEEP: Hows = {
    "summed": ("summed", []),
    "split": ("split", []),
    "split, recompute": ("split", [f"trunk[{i}:{i + 3}]" for i in range(0, BLOCKS, 3)]),
}


def deep_model() -> MultiTaskModel:
    """A trunk of nine blocks of width 64, and two heads of one convolution each."""
    blocks = [_block(3 if index == 0 else 64, 64) for index in range(BLOCKS)]
    tasks = {
        f"head{i}": Segmentation(CLASSES, head=nn.Conv2d(64, CLASSES, 1), target=f"head{i}") for i in (0, 1)
    }
    return MultiTaskModel(nn.Sequential(*blocks), tasks, inputs="image")


def _block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


def timeline(
    model: MultiTaskModel, batch: object, schedule: str, recompute: Sequence[str]
) -> Sequence[Moment]:
    """A step's timeline, once the optimizer has its state."""
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), momentum=0.9), schedule=schedule, recompute=recompute
    )
    engine.step([batch])
    return measure_step(engine, [batch], timeline=True)[1].timeline


def draw(path: Path) -> None:
    """Two columns of three panels, each column at one scale."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    dense = dense_case(HEADS, "cpu")
    image = torch.randn(4, 3, 64, 64)
    labels = {f"head{i}": torch.randint(CLASSES, (4, 64, 64)) for i in (0, 1)}
    deep = deep_model()
    columns = (
        {name: timeline(dense.model, dense.batch, *how) for name, how in DENSE.items()},
        {name: timeline(deep, {"image": image, **labels}, *how) for name, how in DEEP.items()},
    )
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    panels = figure.subplots(3, 2, width_ratios=[3.2, 1])
    for column, (timelines, labelled) in enumerate(zip(columns, (0.06, 0.22), strict=True)):
        draw_panels(dict(zip(timelines, panels[:, column], strict=True)), timelines, labelled)
    panels[1, 0].set_ylabel("live tensor bytes (MiB)")
    panels[2, 0].set_xlabel("operations that allocate or free, in order, over one step")
    panels[2, 1].set_xlabel("the same for a trunk that dominates")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
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
