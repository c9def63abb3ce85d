"""A check of exactness on what a configuration would train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtaccum.config.objects import collate
from mtaccum.config.run import prepare
from mtaccum.config.schema import RunConfig
from mtaccum.data import MicroBatchSampler
from mtaccum.engine import LabelCounts
from mtaccum.exactness import ExactnessReport, check_exactness
from mtaccum.exactness.report import Finding
from mtaccum.model import MultiTaskModel

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
    best: tuple[int, list[Any], list[Finding]] = (-1, [], [])
    enabled = set(model.enabled_tasks())
    for indices in windows_of(sampler):
        sizes = [min(len(part), max(2, config.verify.samples // len(indices))) for part in indices]
        window = [
            collate(config, [dataset[i] for i in part[:size]])
            for part, size in zip(indices, sizes, strict=True)
        ]
        totals = LabelCounts.of(model.tasks_by_name(), window).totals
        labelled = {name for name, total in totals.items() if total > 0}
        if len(labelled) > best[0]:
            total = sum(map(len, indices))
            message = f"{sum(sizes)} of the {total} samples of a batch were compared (verify.samples)."
            taken = [] if sum(sizes) == total else [Finding("samples", "data.train", message, fault=False)]
            best = len(labelled), window, taken
        if labelled == enabled:
            break
    return best[1], best[2]


def windows_of(sampler: MicroBatchSampler) -> Iterator[list[list[int]]]:
    """Indices of the samples of the first windows, by micro-batch."""
    parts = iter(sampler)
    for _ in range(min(_SEARCHED_WINDOWS, sampler.batches)):
        window = [part for _, part in zip(range(sampler.accumulate), parts, strict=False)]
        if window:
            yield window
