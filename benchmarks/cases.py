"""The models that ``peak_memory.py`` measures, each with a batch, and how a schedule runs on them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import dense_model
from torch import Tensor, nn

from mtaccum import LabelCounts, MultiTaskModel, Segmentation, StepOptions, split_backward
from mtaccum.engine import SCHEDULES
from mtaccum.engine.binding import Binding
from mtaccum.engine.result import LossLog
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.model import ROOT
from mtaccum.parallel import SingleProcess

__all__ = ["RECOMPUTED", "Case", "build_case", "dense_case"]

RECOMPUTED = "split, trunk recomputed"
_CLASSES = 13


@dataclass(frozen=True)
class Case:
    """A model and one micro-batch for it, on the same device."""

    model: MultiTaskModel
    batch: dict[str, Tensor]

    def make_gradients(self) -> None:
        """Zero gradients for all parameters, as there are in the middle of a training that zeroes them in
        place. Passes then add to them."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def run(self, schedule: str) -> None:
        """Forward and backward of all tasks by a schedule of the engine, or by ``RECOMPUTED``.

        This is what ``Engine.step`` does between counting the labels and the optimizer's step. The engine
        itself would set existing gradients aside, and drop them after its step.
        """
        if schedule == RECOMPUTED:
            self._run_recomputed()
            return
        labels, ranks = LabelCounts.of(self.model.tasks_by_name(), [self.batch]), SingleProcess()
        counts = WindowCounts.agreed(labels, self.model, ranks)
        log = LossLog(counts)
        binding = Binding(self.model, StepOptions(), ranks, counts, log, nullcontext, True, self.batch, 0)
        roots, inputs = binding.bound(labels.active_in(0))
        del binding
        SCHEDULES[schedule](roots, {ROOT: inputs}, Tensor.backward)

    def _run_recomputed(self) -> None:
        model, batch = self.model, self.batch
        assert model.trunk is not None
        inputs = model.inputs(batch)

        def loss(name: str, features: Any) -> Any:
            task = model.task(name)
            return task.loss(task(features, batch), batch)

        losses: dict[str, Callable[[Any], Tensor]] = {name: partial(loss, name) for name in model.tasks}
        split_backward(partial(model.trunk, inputs), losses, recompute=True)


def build_case(name: str, device: str, quick: bool) -> Case:
    """The case of a name: ``dense-8`` (8 heads), ``digits``, ``independent``, and ``independent-larger`` and
    ``independent-smaller``, each of the two alone.

    Args:
        quick: smaller models and images, for a look; the shipped tasks stay as they are.
    """
    torch.manual_seed(0)
    kind, _, part = name.partition("-")
    if kind == "digits":
        return _digits_case(device)
    if kind == "dense":
        size = {"width": 32, "pixels": 64, "batch_size": 2} if quick else {}
        return dense_case(int(part), device, **size)
    width, pixels, samples = (32, 64, 2) if quick else (128, 128, 8)
    widths = {"larger": width, "smaller": width // 4}
    models: dict[str, nn.Module] = {}
    for which, channels in widths.items():
        if part in ("", which):
            trunk, heads = dense_model(1, channels, _CLASSES)
            models[which] = nn.Sequential(trunk, *heads)
    return _segmenting(None, models, device, pixels, samples)


def dense_case(heads: int, device: str, *, width: int = 128, pixels: int = 128, batch_size: int = 8) -> Case:
    """``dense_model`` as segmentation of 13 classes, on random images (batch_size, 3, pixels, pixels)."""
    trunk, modules = dense_model(heads, width, _CLASSES)
    named = {f"head{index}": module for index, module in enumerate(modules)}
    return _segmenting(trunk, named, device, pixels, batch_size)


def _segmenting(
    trunk: nn.Module | None, heads: dict[str, nn.Module], device: str, pixels: int, samples: int
) -> Case:
    """Each head is a task with random labels (samples, pixels, pixels) of its own."""
    tasks = {name: Segmentation(_CLASSES, head=head, target=name) for name, head in heads.items()}
    batch = {name: torch.randint(0, _CLASSES, (samples, pixels, pixels), device=device) for name in heads}
    batch["image"] = torch.randn(samples, 3, pixels, pixels, device=device)
    return Case(MultiTaskModel(trunk, tasks, inputs="image").to(device), batch)


def _digits_case(device: str) -> Case:
    """What ``python -m mtaccum.train '+tasks=[seg,cls,number,depth]'`` builds, and its first batch."""
    # Here, since it takes a while and only this case needs it.
    from mtaccum.config import Run, RunConfig, prepare, run_command

    runs: list[Run] = []

    def keep(config: RunConfig) -> int:
        runs.append(prepare(config))
        return 0

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        tasks = "+tasks=[seg,cls,number,depth]"
        code = run_command("train", keep, [tasks, f"device={device}", f"hydra.run.dir={run_dir}"])
    if code:
        raise SystemExit(code)
    trainer = runs[0].trainer
    batch: dict[str, Tensor] = next(iter(trainer.loader))
    return Case(trainer.model, {name: value.to(device) for name, value in batch.items()})
