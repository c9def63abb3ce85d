"""A check of exactness on what a configuration would train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtaccum.config.objects import collate
from mtaccum.config.run import prepare
from mtaccum.config.schema import RunConfig
from mtaccum.data import MicroBatchSampler
from mtaccum.engine import WindowPlan
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
    options = config.engine.model_copy(update={"offload": False})  # which a CPU refuses
    # no logger, which might write; on the device of the check
    changes = {"loggers": [], "device": config.verify.device, "engine": options}
    trainer = prepare(config.model_copy(update=changes)).trainer
    window, cut = _window(config, trainer.model, trainer.sampler, trainer.loader.dataset)
    report = check_exactness(
        trainer.model,
        window,
        schedule=options.schedule,
        recompute=options.recompute,
        batchnorm=options.batchnorm,
        groups=options.groups,
        chunks=options.chunks,
        optimizer=trainer.engine.optimizer,
        device=config.verify.device,
    )
    notes = [*cut, *_not_compared(config)]
    return ExactnessReport(
        report.schedule,
        report.samples,
        report.differences,
        report.bounds,
        report.alive,
        [*report.findings, *notes],
    )


def _window(
    config: RunConfig, model: MultiTaskModel, sampler: MicroBatchSampler, dataset: Any
) -> tuple[list[Any], list[Finding]]:
    """The first window that has labels of all tasks once it is cut; or the one with labels of most."""
    best: tuple[int, list[Any], list[Finding]] = (-1, [], [])
    enabled = set(model.enabled_tasks())
    for indices in windows_of(sampler):
        sizes = [min(len(part), max(2, config.verify.samples // len(indices))) for part in indices]
        window = [
            collate(config, [dataset[i] for i in part[:size]])
            for part, size in zip(indices, sizes, strict=True)
        ]
        totals = WindowPlan.of(model.tasks_by_name(), window).totals
        labelled = {name for name, total in totals.items() if total > 0}
        if len(labelled) > best[0]:
            total = sum(map(len, indices))
            message = f"{sum(sizes)} of the {total} samples of a batch were compared (verify.samples)."
            cut = [] if sum(sizes) == total else [Finding("samples", "data.train", message, fault=False)]
            best = len(labelled), window, cut
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


def _not_compared(config: RunConfig) -> list[Finding]:
    notes = []
    if config.engine.precision != "fp32":
        message = f"{config.engine.precision} rounds; what is computed was compared in double precision."
        notes.append(Finding("precision", "engine.precision", message, fault=False))
    if config.engine.compile:
        message = "the modules were compared as they are, not compiled."
        notes.append(Finding("compile", "engine.compile", message, fault=False))
    if config.engine.offload:
        message = "what is kept for the backward was compared without being moved to the host's memory."
        notes.append(Finding("offload", "engine.offload", message, fault=False))
    return notes
