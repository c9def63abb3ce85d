"""Checkpoints: the state of a training between two windows, written so that it is whole or not there."""

from __future__ import annotations

import copy
import inspect
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtaccum.errors import ConfigError, first_line
from mtaccum.parallel import Collectives, is_dtensor

LAST = "last.pt"
"""The state to go on from, in a run's folder."""
BEST = "best.pt"
"""The state that was best by the monitored measure."""
VERSION, _READABLE = 4, (3, 4)
_SINGLE = Collectives()
_SHARDS = ".shards"  # how the name of a folder with shards ends
_FOLDER = "folder"  # the entry of a state that names its folder


def save_checkpoint(state: dict[str, Any], path: Path, ranks: Collectives = _SINGLE) -> None:
    """Write a state of tensors and plain values, atomically. To be called on all ranks.

    Rank 0 writes one file. It goes beside ``path`` first and then takes its place: whoever kills the process
    or fills the disk leaves the previous state whole.

    DTensors are never gathered: each rank writes its shards, by
    ``torch.distributed.checkpoint``, into a folder beside ``path``, and the file names that folder and has
    tensors on the meta device in their places. The folder of the state before goes when the file has been
    replaced.

    Raises:
        OSError: it can't be written (disk full, no permission); the previous state is untouched.
    """
    sharded: dict[str, Tensor] = {}

    def set_apart(name: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and is_dtensor(value)):
            return value
        sharded[name] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    state = {"version": VERSION, **_mapped(state, set_apart)}
    try:
        if sharded:
            folder = path.with_name(ranks.broadcast_object(f"{path.stem}-{uuid.uuid4().hex[:8]}{_SHARDS}"))
            _save_shards(sharded, folder, ranks)
            state[_FOLDER] = folder.name
        _on_rank_zero(
            ranks if sharded else _SINGLE, partial(_save_file, state, path) if ranks.is_rank_zero else None
        )
    finally:
        if ranks.is_rank_zero:
            _remove_others(path)


def _on_rank_zero(ranks: Collectives, save: Callable[[], None] | None) -> None:
    """Let rank 0 save; no rank goes on before it has, and all of them raise if it can't."""
    error = None
    if save is not None:
        try:
            save()
        except OSError as failure:
            error = failure
    said = ranks.broadcast_object(None if error is None else str(error))
    if error is not None:
        raise error
    if said is not None:
        raise OSError(f"rank 0: {said}")


def _mapped(state: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """A nest of dicts and lists with ``function(name, value)`` for each value, as in
    ``optimizer.state.0.exp_avg``."""
    if type(state) in (list, tuple):
        return type(state)(_mapped(value, function, f"{name}.{i}") for i, value in enumerate(state))
    if not isinstance(state, dict):
        return function(name, state)
    made = copy.copy(state)  # a module's state dict is of a type of its own, and has attributes
    for key, value in state.items():
        made[key] = _mapped(value, function, f"{name}.{key}" if name else str(key))
    return made


def _save_shards(tensors: dict[str, Tensor], folder: Path, ranks: Collectives) -> None:
    # imported where it is needed: it takes half as long as PyTorch itself
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(tensors, checkpoint_id=folder, process_group=ranks.host)
    except CheckpointException as error:  # on all ranks, whichever couldn't write
        if any(isinstance(failure[0], KeyboardInterrupt) for failure in error.failures.values()):
            raise KeyboardInterrupt from error
        said = "; ".join(f"rank {rank}: {first_line(failure[0])}" for rank, failure in error.failures.items())
        raise OSError(f"can't write {folder}; is the disk full? ({said})") from error


def _load_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    # each rank reads for itself; before PyTorch had that argument, all had to read together
    alone: Any = {"no_dist": True} if "no_dist" in inspect.signature(load).parameters else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, checkpoint_id=folder, **alone)
    except CheckpointException as error:
        said = first_line(next(iter(error.failures.values()))[0])
        raise ConfigError(f"can't read the tensors in {folder}: {said}") from error


def _remove_others(path: Path) -> None:
    """Remove the folders of states before, and of those that never became whole."""
    name = re.compile(re.escape(path.stem) + "-[0-9a-f]{8}" + re.escape(_SHARDS))
    folders = [folder for folder in path.parent.iterdir() if name.fullmatch(folder.name)]
    if not folders:
        return
    try:
        named = _load_file(path).get(_FOLDER) if path.exists() else None
    except ConfigError:  # what it belongs to can't be known
        return
    for folder in folders:
        if folder.name != named:
            shutil.rmtree(folder, ignore_errors=True)


def _save_file(state: dict[str, Any], path: Path) -> None:
    with _replacing(path) as partial, partial.open("wb") as file:
        try:
            torch.save(state, file)
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
    """Read a state onto the CPU, with all tensors full; nothing but tensors and plain values is unpickled.

    The folder of a state that was sharded has an index that PyTorch unpickles: read only what you
    trust.

    Raises:
        ConfigError: the file is no checkpoint of mtaccum, or damaged, or its folder is missing.
    """
    state = _load_file(path)
    if _FOLDER not in state:
        return state
    folder = path.with_name(state.pop(_FOLDER))
    if not folder.is_dir():
        raise ConfigError(f"the tensors of {path} are missing: they belong into {folder.name} beside it.")
    tensors: dict[str, Tensor] = {}

    def made(name: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_meta):
            return value
        return tensors.setdefault(name, torch.empty_like(value, device="cpu"))

    result: dict[str, Any] = _mapped(state, made)
    _load_shards(tensors, folder)
    return result


def _load_file(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"can't read the checkpoint {path}: {first_line(error)}") from error
    if not isinstance(state, dict) or state.get("version") not in _READABLE:
        raise ConfigError(f"{path} is not a checkpoint of this version of mtaccum.")
    return state
