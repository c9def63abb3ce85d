"""A check of exactness on what a configuration would train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from mtaccum.batch import windows
from mtaccum.config.objects import collate
from mtaccum.config.run import prepare
from mtaccum.config.schema import RunConfig
from mtaccum.data import MicroBatchSampler
from mtaccum.engine import LabelCounts
from mtaccum.exactness import ExactnessReport, check_exactness
from mtaccum.exactness.report import Finding
from mtaccum.model import MultiTaskModel
from mtaccum.tasks import Task

_SEARCHED_WINDOWS = 20


def verify_exactness(config: RunConfig) -> ExactnessReport:
    """Compare the gradients of a configured training with those of the joint backward.

    Takes real batches of its data, with labels of every task if there are any. Writes nothing.

    Raises:
        ConfigError: whatever a user can get wrong in a config.
    """
    # no logger, which might write; on the device of the check
    changes = {
        "loggers": [],
        "device": config.verify.device,
        "engine": config.engine.changed({"offload": False}),
    }
    trainer = prepare(config.model_copy(update=changes)).trainer
    window, taken = _window(config, trainer.model, trainer.sampler, trainer.loader.dataset)
    report = check_exactness(
        trainer.model,
        window,
        options=config.engine,
        optimizer=trainer.engine.optimizer,
        device=config.verify.device,
    )
    return replace(report, findings=[*report.findings, *taken])


def _window(
    config: RunConfig, model: MultiTaskModel, sampler: MicroBatchSampler, dataset: Any
) -> tuple[list[Any], list[Finding]]:
    """The first window that has labels of all tasks once it is shortened; or the one with labels of most."""

    def shortened(indices: list[list[int]]) -> list[list[int]]:
        return [part[: max(2, config.verify.samples // len(indices))] for part in indices]

    def made(indices: list[list[int]]) -> list[Any]:
        return [collate(config, [dataset[i] for i in part]) for part in shortened(indices)]

    _, indices, window = most_labelled(model.tasks_by_name(), sampler, made)
    taken, total = sum(map(len, shortened(indices))), sum(map(len, indices))
    message = f"{taken} of the {total} samples of a batch were compared (verify.samples)."
    return window, [] if taken == total else [Finding("samples", "data.train", message, fault=False)]


def most_labelled(
    tasks: Mapping[str, Task], sampler: MicroBatchSampler, made: Callable[[list[list[int]]], list[Any]]
) -> tuple[int, list[list[int]], list[Any]]:
    """The first window with labels of all tasks, or of the first ones that with labels of most.

    Args:
        made: the batches of a window, from the indices of the samples in each of its micro-batches.

    Returns:
        The number of tasks that have labels in it, its indices, and its batches.
    """
    best: tuple[int, list[list[int]], list[Any]] = (-1, [], [])
    for indices in islice(windows(sampler, sampler.accumulate), _SEARCHED_WINDOWS):
        window = made(indices)
        totals = LabelCounts.of(tasks, window).totals
        labelled = sum(total > 0 for total in totals.values())
        if labelled > best[0]:
            best = labelled, indices, window
        if labelled == len(totals):
            break
    return best
