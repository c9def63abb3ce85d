"""Loggers: where a training's numbers go, and its pictures.

Any object with ``log(step, scalars)`` and ``close()`` is one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch import Tensor

from mtaccum.training.checkpoint import write_text


class Logger(Protocol):
    """What the training calls; ``_target_`` in the config's ``loggers`` may name any class like it.

    Two more methods are called where a logger has them: ``rewind(step)`` before a training is resumed after
    ``step``, and ``log_pictures(step, pictures)`` after an evaluation, with uint8 pictures (3, height, width)
    by name.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note numbers by name, as they are after ``step`` optimizer steps."""

    def close(self) -> None:
        """The training has ended, well or not."""


class TensorBoardLogger:
    """TensorBoard events in a folder."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._purge_step: int | None = None
        self._writer: Any = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._opened().add_scalar(name, value, step)

    def log_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        """Note uint8 pictures (3, height, width) by name, as they are after ``step`` optimizer steps."""
        for name, picture in pictures.items():
            self._opened().add_image(name, picture, step)

    def _opened(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import, and needed here only

            self._writer = SummaryWriter(self._folder, purge_step=self._purge_step)
        return self._writer

    def rewind(self, step: int) -> None:
        """Let TensorBoard hide what was logged after ``step``."""
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class JsonLinesLogger:
    """One JSON object per line: training in ``metrics.jsonl``, validation in ``validation.jsonl``.

    NaN and infinite values are written as null, since JSON has neither. When a training is resumed in
    the same folder, call ``rewind`` first: lines after its step are dropped.
    """

    FILES = ("metrics.jsonl", "validation.jsonl")

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._open: dict[str, TextIO] = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        name = self.FILES[any(key.startswith("val/") for key in scalars)]
        if name not in self._open:
            self._open[name] = (self._folder / name).open("a", encoding="utf-8")
        finite = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        self._open[name].write(json.dumps({"step": step, **finite}) + "\n")
        self._open[name].flush()  # a killed training leaves whole lines

    def rewind(self, step: int) -> None:
        """Drop what was logged after ``step``, and a last line that a killed process left unfinished."""
        for path in (self._folder / name for name in self.FILES):
            if path.is_file():
                lines = path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if _step_of(line) <= step]
                write_text(path, "".join(line + "\n" for line in kept))

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
