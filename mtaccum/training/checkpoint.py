"""Checkpoints: the state of a training between two windows, written so that it is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mtaccum.errors import ConfigError, first_line

LAST, BEST = "last.pt", "best.pt"
VERSION = 3


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a state of tensors and plain values, atomically.

    It goes to a file beside ``path`` first, which then takes its place: whoever kills the process or fills
    the disk leaves the previous state whole.

    Raises:
        OSError: it can't be written (disk full, no permission); the previous state is untouched.
    """
    with _replacing(path) as partial, partial.open("wb") as file:
        try:
            torch.save({"version": VERSION, **state}, file)
        except RuntimeError as error:
            # torch's zip writer reports a failed write so, and nothing of the reason
            raise OSError(f"can't write {path}; is the disk full? ({first_line(error)})") from error
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically as ``save_checkpoint`` does."""
    with _replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write beside ``path``, which takes its place if the block succeeds."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def find_checkpoint(path: str | Path, names: tuple[str, ...] = (LAST,)) -> Path:
    """The checkpoint that ``path`` means: a file, or a run's folder that holds one of ``names``.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ConfigError(
        f"no checkpoint at {str(path)!r}: give a run's folder (with {' or '.join(names)} in it) or a "
        f"checkpoint's file."
    )


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a state onto the CPU; nothing but tensors and plain values is unpickled.

    Raises:
        ConfigError: the file is no checkpoint of mtaccum, or damaged.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"can't read the checkpoint {path}: {first_line(error)}") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ConfigError(f"{path} is not a checkpoint of this version of mtaccum.")
    return state
