"""A run: from a typed config to a finished training and what it leaves in its folder."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from mtaccum.config.checks import (
    CONFIG,
    SUMMARY,
    check_folder,
    check_targets,
    check_tasks,
    find_device,
    import_plugins,
)
from mtaccum.config.objects import build_model, collate, collate_function, instantiate
from mtaccum.config.optimizer import build_optimizer
from mtaccum.config.saved import resume
from mtaccum.config.schema import RunConfig
from mtaccum.data import MicroBatchSampler
from mtaccum.engine import Engine, LabelCounts
from mtaccum.errors import ConfigError, unknown_name
from mtaccum.memory import format_bytes
from mtaccum.model import MultiTaskModel
from mtaccum.parallel import current_ranks, shard
from mtaccum.training import (
    Outcome,
    Trainer,
    TrainerSettings,
    find_checkpoint,
    load_checkpoint,
    make_lr_scheduler,
    write_text,
)
from mtaccum.training.display import print_summary


@dataclass(frozen=True)
class Run:
    """A training that has been checked and can start. Nothing is written before ``execute``."""

    config: RunConfig
    trainer: Trainer

    def describe(self) -> str:
        """What is about to be trained, in a line."""
        config, model = self.config, self.trainer.model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        size = self.trainer.ranks.world_size
        on_ranks = f" on each of {size} ranks" if size > 1 else ""
        return (
            f"training {', '.join(model.enabled_tasks())} ({parameters:,} parameters) on "
            f"{model.device}: {self.trainer.settings.total_steps} steps of "
            f"{config.batch_size} samples{on_ranks}, accumulate={config.micro_batches}, "
            f"schedule {config.engine.schedule}, into {config.run_dir}"
        )

    def execute(self) -> Outcome:
        """Train, and write config, logs, states and summary into the run's folder."""
        folder, first = Path(self.config.run_dir), self.trainer.ranks.is_rank_zero
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            values = self.config.model_dump(by_alias=True)
            write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(values)))
        loggers = self.trainer.loggers
        if self.trainer.steps:
            for logger in loggers:
                if hasattr(logger, "rewind"):
                    logger.rewind(self.trainer.steps)
        try:
            outcome = self.trainer.fit()
        finally:
            for logger in loggers:
                logger.close()
        if first and not outcome.interrupted:
            self._summarize(outcome, folder)
        return outcome

    def _summarize(self, outcome: Outcome, folder: Path) -> None:
        schedule, peak = self.config.engine.schedule, outcome.peak
        summary = {
            "schedule": schedule,
            "batch_size": self.config.batch_size,
            "accumulate": self.config.micro_batches,
            "ranks": self.trainer.ranks.world_size,
            "steps": outcome.steps,
            "micro_batches": outcome.micro_batches,
            "samples": outcome.samples,
            "skipped_steps": self.trainer.engine.skipped_steps.total,
            "peak_bytes": None if peak is None else peak.peak_bytes,
            "peak_method": None if peak is None else peak.method,
            "peak_stage": None if peak is None else peak.stage,
            "peak_by_kind": None if peak is None else dict(peak.by_kind),
            "reserved_bytes": None if peak is None else peak.reserved_bytes,
            "tasks": outcome.evaluation,
            "elapsed_s": round(outcome.elapsed_s, 3),
        }
        write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        shown = "not measured" if peak is None else f"{format_bytes(peak.peak_bytes)} ({peak.method})"
        batch = f"{self.config.batch_size} samples, accumulate={self.config.micro_batches}"
        print_summary(
            outcome.evaluation,
            {"schedule": schedule, "batch": batch, "peak memory": shown, "run": str(folder)},
        )


def prepare(config: RunConfig) -> Run:
    """Build and check everything a training needs, writing nothing.

    Raises:
        ConfigError: whatever a user can get wrong in a config.
    """
    import_plugins(config.plugins)
    check_tasks(config)
    folder = Path(config.run_dir)
    state = None if config.resume is None else load_checkpoint(find_checkpoint(config.resume))
    ranks = current_ranks()
    if ranks.is_rank_zero:
        check_folder(folder, config.resume)
    device = find_device(config.device)
    seed_all(config.seed)
    train = dataset_of("data.train", config.data.train)
    validation = dataset_of("data.val", config.data.val)
    sampler = MicroBatchSampler(
        len(train),
        config.batch_size,
        config.micro_batches,
        shuffle=config.data.shuffle,
        seed=config.seed,
        rank=ranks.rank,
        ranks=ranks.world_size,
    )
    batch = collate(config, [train[i] for i in range(min(2, len(train)))])
    model, config = build_model(config, batch)
    check_targets(config, model, train)
    LabelCounts.of(model.tasks_by_name(), [batch])  # labels out of range are said now if they are in sight
    model.to(device)
    if config.parallel.kind == "fsdp":
        if config.trainer.ema_decay is not None:
            raise ConfigError("trainer.ema_decay doesn't go with parallel=fsdp; use parallel=ddp.")
        shard(model)
    optimizer = build_optimizer(config, model)
    settings = _settings(config, model, sampler)
    course = config.lr_schedule
    scheduler = make_lr_scheduler(
        optimizer, course.name, settings.total_steps, course.warmup_steps, course.final_fraction or 0.0
    )
    engine = Engine(model, optimizer, options=config.step_options, lr_scheduler=scheduler)
    loaders = _loaders(config, device, train, validation, sampler)
    trainer = Trainer(engine, *loaders, settings, folder)
    if ranks.rank:  # weights are those of the first rank; dropout and augmentation are each rank's own
        seed_all(config.seed + _SEEDS_APART * ranks.rank)
    if state is not None:
        resume(trainer, state, config)
    # last, since a logger of the user's own may write when it is made
    trainer.loggers = [_logger(logger) for logger in config.loggers if ranks.is_rank_zero]
    return Run(config, trainer)


def _loaders(
    config: RunConfig, device: torch.device, train: Any, validation: Any, sampler: MicroBatchSampler
) -> tuple[DataLoader[Any], MicroBatchSampler, DataLoader[Any]]:
    """This rank's batches to train on, how they were split, and those to evaluate on."""
    ranks, function = current_ranks(), config.data.collate_fn
    loading: dict[str, Any] = {
        "num_workers": config.data.workers,
        "collate_fn": None if function is None else collate_function(function),
        "pin_memory": device.type == "cuda",  # or copies to the device wait for it
        # of their own: they draw a seed in each epoch, which must not move the model's dropout
        "generator": torch.Generator().manual_seed(config.seed + _SEEDS_APART * ranks.rank),
    }
    own = range(ranks.rank, len(validation), ranks.world_size)
    evaluated = DataLoader(validation, batch_size=config.data.eval_batch_size, sampler=own, **loading)
    return DataLoader(train, batch_sampler=sampler, **loading), sampler, evaluated


# between the ranks, as the sampler's between epochs
_SEEDS_APART = 1_000_003


def _logger(config: Mapping[str, Any]) -> Any:
    logger = instantiate("loggers", config)
    for method in ("log", "close"):
        if not callable(getattr(logger, method, None)):
            raise ConfigError(
                f"loggers: {type(logger).__name__} has no {method}(); it needs log() and close()."
            )
    return logger


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def dataset_of(place: str, config: Mapping[str, Any]) -> Any:
    dataset = instantiate(place, config)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{place}: {type(dataset).__name__} needs both __len__ and __getitem__.")
    if len(dataset) == 0:
        raise ConfigError(f"{place}: the data set is empty.")
    return dataset


def _settings(config: RunConfig, model: MultiTaskModel, sampler: MicroBatchSampler) -> TrainerSettings:
    trainer = config.trainer
    senses: dict[str, bool | None] = {"loss": False}
    for name in model.enabled_tasks():
        senses[f"{name}/loss"] = False
        for key, metric in model.task(name).metrics().items():
            senses[f"{name}/{key}"] = metric.higher_is_better
    if trainer.monitor not in senses:
        raise ConfigError(unknown_name("metric in trainer.monitor:", trainer.monitor, senses))
    maximize = senses[trainer.monitor] if trainer.mode == "auto" else trainer.mode == "max"
    if maximize is None:
        raise ConfigError(f"trainer.mode: say min or max, {trainer.monitor} doesn't tell which is better.")
    return TrainerSettings(
        total_steps=trainer.max_steps or (trainer.epochs or 0) * sampler.batches,
        maximize=maximize,
        **trainer.model_dump(exclude={"max_steps", "epochs", "mode"}),
    )
