"""What ``planner_accuracy.py`` looks at: models with a batch and an optimizer, built anew as often as asked.

The shipped configs, the dense model of ``peak_memory.py``, trunks of timm, and a dilated ResNet-50 with
DeepLab heads of torchvision.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from library_models import DilatedResNet, OfTimm, deeplab_head
from models import dense_model
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from mtaccum import Classification, MultiTaskModel, Regression, Segmentation, StepOptions
from mtaccum.memory import FakeTraining

__all__ = ["ADAMW", "OF_CONFIG", "SGDM", "Spec", "Subject", "subject_of"]

ADAMW, SGDM, ADAM, OF_CONFIG = "AdamW", "SGD, momentum", "Adam", "as configured"
_CLASSES = 13
_DEFAULTS = StepOptions()
# what "with recompute" is for each trunk of timm
_SEGMENTS: dict[str, tuple[str, ...]] = {
    "resnet18": ("trunk.body.conv1", "trunk.body.layer*"),
    "vit_tiny_patch16_224": ("trunk.body.model.blocks.*", "seg"),
    "convnext_atto": ("trunk.body.stages_*",),
    "swin_tiny_patch4_window7_224": ("trunk.body.layers_*", "depth"),
}


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=1e-4)


class Spec(NamedTuple):
    """A model by name, as it is handed to another process.

    Attributes:
        kind: ``config``, ``dense``, ``timm`` or ``deeplab``.
        name: the command's options, a number of heads, a model of timm, or a number of heads.
        samples: of a batch; of a config as it says.
        pixels: height of the images; the width is the same, for ``deeplab`` 4/3 of it.
    """

    kind: str
    name: str
    samples: int = 8
    pixels: int = 128

    @property
    def title(self) -> str:
        """For people."""
        size = f"batch {self.samples}, {self.pixels}x{self.pixels}"
        if self.kind == "config":
            return f"config {self.name}"
        if self.kind == "dense":
            return f"{self.name} dense heads, {size}"
        if self.kind == "timm":
            return f"timm {self.name}, 3 heads, {size}"
        size = f"batch {self.samples}, {self.pixels}x{self.pixels * 4 // 3}"
        return f"dilated ResNet-50, {self.name} DeepLab heads, {size}"

    @property
    def library(self) -> str | None:
        """What has to be installed."""
        return {"timm": "timm", "deeplab": "torchvision"}.get(self.kind)


@dataclass(frozen=True)
class Subject:
    """A training step that can be predicted and run.

    Attributes:
        build: makes the model.
        batch: of one step.
        segments: what is recomputed where a step is run "with recompute".
        optimizers: by name; each makes the optimizer of a model.
        options: of its steps, but for what is compared.
    """

    build: Callable[[], MultiTaskModel]
    batch: Any
    segments: tuple[str, ...]
    optimizers: Mapping[str, Callable[[MultiTaskModel], Optimizer]]
    options: StepOptions = _DEFAULTS

    def fake(self, optimizer: str) -> FakeTraining:
        """On fake tensors, for predictions and plans."""
        return FakeTraining(
            self.build, self.batch, build_optimizer=self.optimizers[optimizer], options=self.options
        )

    def real(self, optimizer: str) -> tuple[MultiTaskModel, Optimizer]:
        """With values."""
        torch.manual_seed(0)
        model = self.build()
        return model, self.optimizers[optimizer](model)


def subject_of(spec: Spec) -> Subject:
    """The subject of a name.

    Raises:
        ImportError: its library is missing.
    """
    if spec.library is not None:
        import_module(spec.library)
    torch.manual_seed(0)
    makers = {"config": _config, "dense": _dense, "timm": _timm, "deeplab": _deeplab}
    return makers[spec.kind](spec)


# --- shipped configs --------------------------------------------------------------------------------------


def _config(spec: Spec) -> Subject:
    """What the command builds for these options, and the first batch with labels of all tasks."""
    # Here, since it takes a while.
    from mtaccum.config import RunConfig, prepare, run_command
    from mtaccum.config.objects import build_model
    from mtaccum.config.optimizer import build_optimizer
    from mtaccum.config.plan import fake_training

    found: list[Subject] = []

    def keep(config: RunConfig) -> int:
        batch = fake_training(config, "cpu")[0].batch
        config = prepare(config).config  # in which the heads' channels are filled in
        segments = ("trunk.stem", "trunk.levels.*") if config.trunk else tuple(config.tasks)
        options = StepOptions(precision=config.engine.precision, max_grad_norm=config.engine.max_grad_norm)

        def build() -> MultiTaskModel:
            return build_model(config)[0]

        optimizers = {OF_CONFIG: partial(build_optimizer, config)}
        found.append(Subject(build, batch, segments, optimizers, options))
        return 0

    with tempfile.TemporaryDirectory() as folder:
        words = [*shlex.split(spec.name), "device=cpu", f"hydra.run.dir={Path(folder) / 'run'}"]
        code = run_command("train", keep, words)
    if code:
        raise SystemExit(code)
    return found[0]


# --- models -----------------------------------------------------------------------------------------------


def _dense(spec: Spec) -> Subject:
    """``dense_model`` as segmentation."""
    names = [f"head{index}" for index in range(int(spec.name))]

    def build() -> MultiTaskModel:
        trunk, heads = dense_model(len(names), classes=_CLASSES)
        return _segmenting(trunk, dict(zip(names, heads, strict=True)))

    batch = _labelled(names, spec.samples, spec.pixels, spec.pixels)
    return Subject(build, batch, ("trunk[0:4]", "trunk[4:8]"), {ADAMW: _adamw, SGDM: _sgd})


def _segmenting(trunk: nn.Module, heads: Mapping[str, nn.Module]) -> MultiTaskModel:
    tasks = {
        name: Segmentation(_CLASSES, head=head, target=name, size_like="image")
        for name, head in heads.items()
    }
    return MultiTaskModel(trunk, tasks, inputs="image")


def _labelled(names: list[str], samples: int, height: int, width: int) -> dict[str, Tensor]:
    """Random images (samples, 3, height, width), and labels (samples, height, width) by name."""
    labels = {name: torch.randint(0, _CLASSES, (samples, height, width)) for name in names}
    return {"image": torch.randn(samples, 3, height, width), **labels}


def _timm(spec: Spec) -> Subject:
    """Two dense heads and a pooled one, as the library has them."""

    def build() -> MultiTaskModel:
        trunk = OfTimm(spec.name, spec.pixels)
        tasks = {
            "seg": Segmentation(_CLASSES, trunk.channels, size_like="image"),
            "depth": Regression(dense=True, in_channels=trunk.channels, size_like="image"),
            "cls": Classification(10, trunk.channels),
        }
        return MultiTaskModel(trunk, tasks, inputs="image")

    batch = _labelled(["seg"], spec.samples, spec.pixels, spec.pixels)
    batch["depth"] = torch.rand(spec.samples, 1, spec.pixels, spec.pixels)
    batch["cls"] = torch.randint(0, 10, (spec.samples,))
    return Subject(build, batch, _SEGMENTS[spec.name], {ADAMW: _adamw, SGDM: _sgd})


def _deeplab(spec: Spec) -> Subject:
    """DeepLab heads on a dilated ResNet; Adam."""
    names = [f"task{index}" for index in range(int(spec.name))]

    def build() -> MultiTaskModel:
        trunk = DilatedResNet()
        return _segmenting(trunk, {name: deeplab_head(trunk.channels, _CLASSES) for name in names})

    batch = _labelled(names, spec.samples, spec.pixels, spec.pixels * 4 // 3)
    segments = tuple(f"trunk.layer{stage}" for stage in (1, 2, 3, 4))
    return Subject(build, batch, segments, {ADAM: _adam})
