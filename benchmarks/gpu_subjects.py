"""What the parts of ``gpu.py`` train, and the ways of running its step.

Together with ``gpu_ranks.py`` all that they know of mtaccum's names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_setting import Setting
from models import dense_model
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mtaccum import (
    Classification,
    Engine,
    InexactWarning,
    MultiTaskModel,
    Segmentation,
    StepOptions,
    split_batch,
)
from mtaccum.memory import FakeTraining, measure_peak, measure_step

__all__ = [
    "Subject",
    "Trained",
    "Way",
    "attention_subject",
    "dense_subject",
    "predictor",
    "quietly",
    "sgd",
    "small_subject",
]

_MIB, _CLASSES = 2**20, 13
_DENSE_BYTES = 305 * _MIB  # of activations under summed: 8 heads, (8, 3, 128, 128), by peak_memory.py
BuildOptimizer = Callable[[nn.Module], Optimizer]
_PART_OF_FREE = 0.3  # of a card's free memory, for the activations of the largest step


@dataclass(frozen=True)
class Way:
    """How a step is run: arguments of an engine, and into how many micro-batches the batch is split."""

    schedule: str = "split"
    accumulate: int = 1
    recompute: tuple[str, ...] = ()
    precision: str = "fp32"
    offload: bool = False
    compile: bool | Mapping[str, Any] = False

    def __str__(self) -> str:
        words = [self.schedule]
        words += [f"recompute {' '.join(self.recompute)}"] if self.recompute else []
        words += [f"K={self.accumulate}"] if self.accumulate > 1 else []
        words += [self.precision] if self.precision != "fp32" else []
        words += ["offload"] * self.offload + ["compiled"] * bool(self.compile)
        return ", ".join(words)


@dataclass(frozen=True)
class Subject:
    """A model and one batch for it, on the host.

    Attributes:
        segments: of the trunk, to be recomputed.
    """

    title: str
    build: Callable[[], MultiTaskModel]
    batch: dict[str, Tensor]
    segments: tuple[str, ...]

    def ways(self) -> list[Way]:
        """The schedules, and what else changes the memory of a step."""
        schedules = [Way(schedule) for schedule in ("summed", "sequential", "split")]
        return [
            *schedules,
            Way(recompute=self.segments),
            Way(accumulate=4),
            Way(accumulate=4, recompute=self.segments),
        ]


def dense_subject(setting: Setting, heads: int = 8) -> Subject:
    """The dense model on images up to (16, 3, 256, 256), as the card's memory allows with 8 heads."""
    if setting.quick:
        return _dense(min(heads, 3), width=8, samples=4, pixels=32)
    sizes = [(16, 256), (8, 256), (8, 128), (4, 128)] if setting.cuda else [(8, 128)]
    room = _PART_OF_FREE * setting.free_bytes()
    fitting = [size for size in sizes if _DENSE_BYTES * size[0] / 8 * (size[1] / 128) ** 2 <= room]
    samples, pixels = (fitting or sizes[-1:])[0]
    return _dense(heads, width=128, samples=samples, pixels=pixels)


def small_subject() -> Subject:
    """Two heads on small images: whether a step runs at all."""
    return _dense(2, width=8, samples=4, pixels=16)


def _dense(heads: int, *, width: int, samples: int, pixels: int) -> Subject:
    names = [f"head{index}" for index in range(heads)]

    def build() -> MultiTaskModel:
        trunk, modules = dense_model(heads, width, _CLASSES)
        tasks = {
            name: Segmentation(_CLASSES, head=module, target=name)
            for name, module in zip(names, modules, strict=True)
        }
        return MultiTaskModel(trunk, tasks, inputs="image")

    random = torch.Generator().manual_seed(0)
    labels = {n: torch.randint(_CLASSES, (samples, pixels, pixels), generator=random) for n in names}
    batch = {"image": torch.randn(samples, 3, pixels, pixels, generator=random), **labels}
    title = f"{heads} dense heads, width {width}, {tuple(batch['image'].shape)}"
    return Subject(title, build, batch, ("trunk.0", "trunk.1", "trunk[2:8]"))


def attention_subject(setting: Setting) -> Subject:
    """A transformer trunk with dropout and 4 pooled heads: what a card computes in kernels of its own."""
    layers, width, samples, tokens = (2, 32, 4, 16) if setting.quick else (8, 512, 8, 512)
    names = [f"head{index}" for index in range(4)]

    def build() -> MultiTaskModel:
        made = [_Block(width) for _ in range(layers)]
        tasks = {n: Classification(_CLASSES, head=_Pooled(width), target=n) for n in names}
        return MultiTaskModel(nn.Sequential(*made), tasks, inputs="x")

    random = torch.Generator().manual_seed(0)
    batch = {n: torch.randint(_CLASSES, (samples,), generator=random) for n in names}
    batch["x"] = torch.randn(samples, tokens, width, generator=random)
    title = f"transformer of {layers} layers, 4 pooled heads, {tuple(batch['x'].shape)}"
    return Subject(title, build, batch, (f"trunk[0:{layers // 2}]", f"trunk[{layers // 2}:{layers}]"))


class _Block(nn.TransformerEncoderLayer):
    """A layer of a transformer, (batch, tokens, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 8, 4 * width, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class _Pooled(nn.Module):
    """The mean over the tokens, (batch, tokens, width) to (batch, classes)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.mean(dim=1))
        return result


class Trained:
    """A subject on the device: one model and optimizer, which all ways of running its step share."""

    def __init__(
        self, subject: Subject, setting: Setting, build_optimizer: BuildOptimizer | None = None
    ) -> None:
        torch.manual_seed(0)
        self.subject, self.setting = subject, setting
        self.device = torch.device(setting.device)
        self.model = subject.build().to(self.device)
        self.optimizer = (build_optimizer or _adamw)(self.model)
        self._engines: dict[str, Engine] = {}

    def engine(self, way: Way) -> Engine:
        """The engine of a way, made once."""
        if str(way) not in self._engines:
            self._engines[str(way)] = Engine(
                self.model,
                self.optimizer,
                schedule=way.schedule,
                recompute=way.recompute,
                precision=way.precision,
                offload=way.offload,
                compile=way.compile,
            )
        return self._engines[str(way)]

    def window(self, way: Way, where: str = "device") -> list[Any]:
        """The batch in micro-batches: on the ``device``, or on the ``host``, there ``pinned`` perhaps."""
        batch = self.subject.batch
        if where == "device":
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        elif where == "pinned":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return split_batch(batch, way.accumulate)

    def step(self, way: Way, where: str = "device") -> Callable[[], Any]:
        """A function that runs one optimizer step."""
        return partial(quietly, self.engine(way).step, self.window(way, where))

    def peaks(self, way: Way) -> dict[str, Any]:
        """Bytes of one step, once the optimizer has its state: tensors at their peak, by the tracker; and by
        the allocator, in a step without it and with nothing left from other steps."""
        # from the host, as is predicted: on the device is only the micro-batch that runs
        engine, window = self.engine(way), self.window(way, "host")
        quietly(engine.step, window)
        live = quietly(measure_step, engine, window)[1]
        found = {
            "live_bytes": sum(live.by_kind.values()),
            "start_bytes": live.start_bytes,
            "stage": live.stage,
        }
        if not self.setting.cuda:
            return {**found, "allocated_bytes": None, "reserved_bytes": None}
        self.setting.empty_cache()
        report = quietly(measure_peak, partial(engine.step, window), device=self.device)
        assert report.reserved_bytes is not None
        return {
            **found,
            "allocated_bytes": report.peak_bytes,
            "reserved_bytes": report.peak_bytes + report.reserved_bytes,
        }


def predictor(subject: Subject, kind: str, precision: str = "fp32") -> Callable[[Way], int]:
    """A function that predicts a step's peak in bytes, allocating nothing.

    Args:
        kind: ``cpu``; or ``cuda``, as for a card that isn't there.
    """
    options = StepOptions(precision=precision)
    training = FakeTraining(
        subject.build, subject.batch, build_optimizer=_adamw, device=kind, options=options
    )

    def predict(way: Way) -> int:
        chosen = {"schedule": way.schedule, "recompute": way.recompute, "offload": way.offload}
        return training.predict(options.changed(chosen), way.accumulate).peak_bytes

    return predict


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


def sgd(model: nn.Module) -> Optimizer:
    """Without numbers of its own that it would read in each step."""
    return SGD(model.parameters(), lr=1e-4, momentum=0.9)


def quietly(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function without the warning that BatchNorm sees micro-batches, of no consequence here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        return function(*arguments, **named)
