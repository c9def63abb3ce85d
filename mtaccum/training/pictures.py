"""Pictures of a training: input, prediction and label of dense tasks, and the memory of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtaccum.batch import Inputs, batch_size_of, get_field, own_view, take_samples, to_device
from mtaccum.errors import BatchError
from mtaccum.memory import PeakReport
from mtaccum.memory.picture import draw_timelines, pixels_of
from mtaccum.model import MultiTaskModel, evaluating
from mtaccum.model.tree import named_errors
from mtaccum.state import not_learning, random_state_kept
from mtaccum.structure import map_tensors
from mtaccum.tasks import Task
from mtaccum.tasks.colours import finite_limits
from mtaccum.training.loggers import Logger

GAP = 4
"""Width of the white lines between the pictures of a grid, in pixels."""
SMALL, LARGE = 128, 512
"""The longer side of a picture is enlarged up to the one and reduced down to the other, by whole factors."""
_OFF = "trainer.pictures=0 leaves all pictures out"


class Pictures:
    """The first validation samples, and their pictures for the loggers that take some."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._batches: list[Any] = []

    def watch(self, batches: Iterable[Any], loggers: Sequence[Logger]) -> Iterator[Any]:
        """Hands on the batches of an evaluation. From the first one on, copies of its first samples are kept:
        so they are loaded once, and are the same ones ever after, also where the loader shuffles."""
        missing = 0 if self._batches or not _takers(loggers) else self._samples
        kept = []
        for batch in batches:
            for part, count in _first_of([batch], missing):
                kept.append(map_tensors(part, Tensor.clone, strict=False))  # a part is a view of the whole
                missing -= count
            yield batch
        self._batches = self._batches or kept

    def log(self, step: int, model: MultiTaskModel, loggers: Sequence[Logger]) -> None:
        """Give the loggers that take pictures one for each dense task, named ``val/TASK``."""
        takers = _takers(loggers)
        if not takers or not self._batches:
            return
        drawn = draw_pictures(model, self._batches, self._samples)
        for logger in takers if drawn else ():
            logger.log_pictures(step, {f"val/{name}": picture for name, picture in drawn.items()})


def log_timeline(step: int, title: str, report: PeakReport, loggers: Sequence[Logger]) -> None:
    """Give the loggers that take pictures one named ``memory/step`` of the step that was measured, if
    matplotlib is installed."""
    takers = _takers(loggers)
    if not takers or not report.timeline:
        return
    try:
        picture = pixels_of(draw_timelines({title: report.timeline}))
    except ImportError:  # matplotlib is an extra
        return
    for logger in takers:
        logger.log_pictures(step, {"memory/step": picture})


def _takers(loggers: Sequence[Any]) -> list[Any]:
    return [logger for logger in loggers if hasattr(logger, "log_pictures")]


def draw_pictures(model: MultiTaskModel, batches: Iterable[Any], samples: int) -> dict[str, Tensor]:
    """Predictions of the first samples of some batches, drawn by the tasks' own ``draw``.

    Args:
        model: run in evaluation mode and without a graph; modes, buffers and random state are left as they
            were.
        batches: with inputs and targets; left as they are. A task is drawn from those that hold its target.
        samples: how many samples at most.

    Returns:
        For each enabled task that draws itself one uint8 picture (3, height, width): a row for each sample,
        of the input, the prediction and the label. The input is left out where it is no image, which is a
        tensor (batch, 1 or 3, height, width).

    Raises:
        TaskError: a task couldn't be run or drawn (names it).
    """
    rows: dict[str, list[Tensor]] = {}
    with random_state_kept(), evaluating(model), not_learning(model):
        for batch, _ in _first_of(batches, samples):
            for name, drawn in _draw(model, batch):
                rows.setdefault(name, []).extend(drawn)
    return {name: _below_each_other(drawn[:samples]) for name, drawn in rows.items()}


def _first_of(batches: Iterable[Any], samples: int) -> Iterator[tuple[Any, int]]:
    """Parts of the batches that hold the first samples together, and how many of them each holds. A batch
    that can't be split goes in whole, since evaluation doesn't need to split it."""
    for batch in batches:
        if samples <= 0:
            return
        try:
            count = min(samples, batch_size_of(batch))
            part = take_samples(batch, count) if count else None
        except BatchError:
            part, count = batch, samples
        if count:
            yield part, count
        samples -= count


def _draw(model: MultiTaskModel, batch: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """For each task that is drawn its rows, RGB (3, height, width) in [0, 1]."""
    tasks = {name: model.task(name) for name in model.enabled_tasks() if _can_draw(model.task(name), batch)}
    if not tasks:
        return
    # copies: a trunk that writes into its input must not change what is drawn the next time
    batch = map_tensors(to_device(batch, model.device), Tensor.clone, strict=False)
    image = _as_image(model.inputs(batch))
    with named_errors(lambda: f"predicting for pictures failed ({_OFF})"):
        predictions = model(batch, tasks)
    for name, task in tasks.items():
        with named_errors(lambda name=name: f"drawing task {name!r} failed ({_OFF})"):  # type: ignore[misc]
            drawn = task.draw(predictions[name], own_view(batch))
            if drawn is not None:
                _check(drawn)
                yield name, _side_by_side(image, *drawn)


def _can_draw(task: Task, batch: Any) -> bool:
    if getattr(task.draw, "__func__", None) is Task.draw:
        return False
    return task.target is None or get_field(batch, task.target, None) is not None


def _check(drawn: Any) -> None:
    pair = isinstance(drawn, tuple | list) and len(drawn) == 2
    if pair and all(isinstance(p, Tensor) and p.is_floating_point() and p.dim() == 4 for p in drawn):
        prediction, label = drawn
        if prediction.shape[:2] == label.shape[:2] and label.shape[1] == 3:
            return
    parts = drawn if isinstance(drawn, tuple | list) else [drawn]
    given = [f"{tuple(p.shape)} {p.dtype}" if isinstance(p, Tensor) else type(p).__name__ for p in parts]
    raise TypeError(
        f"its draw() returned {' and '.join(given) or 'nothing'}. Return two RGB pictures, of the prediction "
        f"and the label, (batch, 3, height, width) of floats in [0, 1]; or None for no picture."
    )


def _as_image(inputs: Any) -> Tensor | None:
    """The inputs as RGB (batch, 3, height, width), each sample from its least value, black, to its largest;
    None if they are no image."""
    if isinstance(inputs, Inputs) and len(inputs) == 1:
        (inputs,) = inputs.values()
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        return None
    if inputs.is_complex() or inputs.numel() == 0:
        return None
    values = inputs.float()
    low, high = finite_limits(values)
    span = (high - low).clamp_min(torch.finfo(values.dtype).tiny)
    return ((values - low) / span).expand(-1, 3, -1, -1)


def _side_by_side(image: Tensor | None, prediction: Tensor, label: Tensor) -> list[Tensor]:
    """Rows, RGB (3, height, width) on the CPU; the pictures take the size of the first one."""
    given = [prediction, label]
    if image is not None and len(image) == len(label):  # a trunk may get several images of a sample
        given.insert(0, image)
    first = given[0] if len(given) == 3 else label
    size = _shown_size(*first.shape[-2:])
    cells = [F.interpolate(p.float(), size=size, mode="nearest-exact").nan_to_num(0).cpu() for p in given]
    gap = torch.ones(len(label), 3, size[0], GAP)
    row = [part for cell in cells for part in (cell.clamp(0, 1), gap)][:-1]
    return list(torch.cat(row, dim=3))


def _shown_size(height: int, width: int) -> tuple[int, int]:
    longer = max(height, width)
    factor, divisor = max(1, SMALL // longer), -(-longer // LARGE)
    return max(1, height * factor // divisor), max(1, width * factor // divisor)


def _below_each_other(rows: list[Tensor]) -> Tensor:
    """One uint8 picture of rows (3, height, width), which may differ in size."""
    width = max(row.shape[2] for row in rows)
    parts = [F.pad(row, (0, width - row.shape[2], 0, GAP), value=1.0) for row in rows]
    return (torch.cat(parts, dim=1)[:, :-GAP] * 255).round().to(torch.uint8)
