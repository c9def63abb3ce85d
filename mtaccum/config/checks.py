"""What a run checks before anything is trained or written."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtaccum.batch import own_view
from mtaccum.config.objects import collate
from mtaccum.config.schema import RunConfig
from mtaccum.errors import BatchError, ConfigError, first_line
from mtaccum.model import MultiTaskModel
from mtaccum.tasks import Task
from mtaccum.training import BEST, LAST, find_checkpoint

CONFIG, SUMMARY = "config.yaml", "summary.json"
SCANNED_SAMPLES = 1000


def import_plugins(modules: list[str]) -> None:
    """Import the modules that register tasks."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the plugin {name!r} can't be imported: {type(error).__name__}: {error}. Name a module that "
                f"Python finds from here: installed, in the current folder, or on PYTHONPATH."
            ) from error


def find_device(name: str) -> torch.device:
    """The device of that name, if it is on this machine; ``auto`` is CUDA, then Apple's MPS, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"device: can't use {name!r}: {reason}. Valid: auto, cpu, cuda, cuda:1, mps."
        ) from error
    if device.type == "meta":
        raise ConfigError("device: 'meta' holds no data. Valid: auto, cpu, cuda, cuda:1, mps.")
    return device


def check_tasks(config: RunConfig) -> None:
    """At least one task must be chosen and switched on."""
    if not config.tasks:
        raise ConfigError("no task was chosen. Choose some: '+tasks=[seg,cls]'.")
    enabled = [t for t in config.tasks.values() if t.get("mode") != "off" and t.get("weight", 1) != 0]
    if not enabled:
        raise ConfigError("every task is switched off (mode off, or weight 0); leave at least one on.")


def check_folder(folder: Path, resume: str | None) -> None:
    """A new run may not overwrite another one."""
    resumed = None if resume is None else find_checkpoint(resume).parent.resolve()
    there = [name for name in (LAST, BEST, SUMMARY, CONFIG) if (folder / name).exists()]
    if there and resumed != folder.resolve():
        raise ConfigError(
            f"the folder {str(folder)!r} holds a run already ({there[0]}). Choose another with "
            f"hydra.run.dir=..., or go on with that one: resume={folder}."
        )


def check_targets(config: RunConfig, model: MultiTaskModel, train: Any) -> None:
    """Each enabled task's target must turn up among the first samples."""
    missing = {name: model.task(name) for name in model.enabled_tasks()}
    scanned = min(SCANNED_SAMPLES, len(train))
    for index in range(scanned):
        batch = collate(config, [train[index]])
        missing = {name: task for name, task in missing.items() if not _has_label(name, task, batch)}
        if not missing:
            return
    entries = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    raise ConfigError(
        "\n".join(
            f"tasks.{name}: no label under its target {task.target!r} in any of the first {scanned} samples."
            for name, task in missing.items()
        )
        + f"\nThe samples have: {entries}."
    )


def _has_label(name: str, task: Task, batch: Any) -> bool:
    try:
        return bool(task.count(own_view(batch)) > 0)
    except (RuntimeError, TypeError, AttributeError, LookupError, BatchError) as error:
        raise ConfigError(
            f"tasks.{name}: counting its labels failed: {type(error).__name__}: {error}"
        ) from error
