"""A plan for a configured training: which of its engine options fit a memory budget best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mtaccum.config.checks import check_tasks, find_device, import_plugins
from mtaccum.config.objects import build_model, collate
from mtaccum.config.optimizer import build_optimizer
from mtaccum.config.run import dataset_of, seed_all
from mtaccum.config.schema import RunConfig
from mtaccum.config.verify import most_labelled
from mtaccum.data import MicroBatchSampler
from mtaccum.errors import BudgetError, ConfigError
from mtaccum.memory import FakeTraining, format_bytes
from mtaccum.memory.picture import draw_timelines, pixels_of
from mtaccum.memory.predict import predict_evaluation
from mtaccum.planning import PLANNED, PlanReport, budget_of, plan_training
from mtaccum.structure import map_tensors
from mtaccum.training import TensorBoardLogger, write_text

PLAN, PICTURE = "plan.json", "plan.png"


def plan_config(config: RunConfig) -> PlanReport:
    """The plans for a configured training within ``memory.budget``. Writes nothing.

    Raises:
        ConfigError: whatever a user can get wrong in a config, options that are to be planned among it.
        PredictionError: a model whose memory can't be predicted.
    """
    _refuse_what_is_planned(config)
    budget = budget_of(config.memory.budget, _device_of(config))
    training, notes = fake_training(config, budget.device)
    evaluation = predict_evaluation(training, config.data.eval_batch_size)
    if evaluation > budget.tensor_bytes:
        notes.append(
            f"evaluation takes data.eval_batch_size={config.data.eval_batch_size} samples at once, some "
            f"{format_bytes(evaluation)}, which is more than the budget; choose a smaller one"
        )
    return plan_training(training, budget, notes)


def planned(config: RunConfig, report: PlanReport) -> RunConfig:
    """The config with the recommended plan in it.

    Raises:
        BudgetError: nothing fits.
    """
    plan = report.recommended
    if plan is None:
        raise BudgetError(report.reasons())
    engine = config.engine.changed({name: getattr(plan.options, name) for name in PLANNED})
    return config.model_copy(update={"engine": engine, "accumulate": plan.accumulate})


def save_plan(report: PlanReport, folder: Path) -> None:
    """Write ``plan.json`` into a run's folder; with matplotlib also a picture of the schedules' and the
    recommended plan's memory over a step, as ``plan.png`` and for TensorBoard."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PLAN, json.dumps(report.as_dict(), indent=2) + "\n")
    plans = dict(report.schedules)
    if report.recommended is not None and report.recommended not in plans.values():
        plans[f"recommended: {report.recommended.describe()}, K={report.recommended.accumulate}"] = (
            report.recommended
        )
    timelines = {name: plan.prediction.timeline for name, plan in plans.items()}
    try:
        figure = draw_timelines(timelines, title="predicted memory over one step")
    except ImportError:  # matplotlib is an extra
        return
    figure.savefig(folder / PICTURE, dpi=110)
    logger = TensorBoardLogger(folder)
    logger.log_pictures(0, {"memory/plan": pixels_of(figure)})
    logger.close()


def fake_training(config: RunConfig, device: str) -> tuple[FakeTraining, list[str]]:
    """What a config would train, without memory, and what there is to say of it."""
    import_plugins(config.plugins)
    check_tasks(config)
    seed_all(config.seed)
    train = dataset_of("data.train", config.data.train)
    config = _with_channels(config, collate(config, [train[i] for i in range(min(2, len(train)))]))
    options = config.engine
    training = FakeTraining(
        lambda: build_model(config)[0],
        _labelled_batch(config, train),
        build_optimizer=lambda model: build_optimizer(config, model),
        device=device,
        options=options,
        copies=0 if config.trainer.ema_decay is None else 1,
    )
    notes = []
    if options.compile:
        notes.append("the modules were predicted as they are; compiled ones may need less")
    if options.batchnorm == "sync":
        notes.append("batchnorm=sync was predicted as keep")
    return training, notes


def _refuse_what_is_planned(config: RunConfig) -> None:
    given = [name for name in ("accumulate", "micro_batch_size") if getattr(config, name) is not None]
    given += [f"engine.{name}" for name in PLANNED[1:] if getattr(config.engine, name)]
    given += [f"engine={config.engine.schedule}"] if config.engine.schedule != "split" else []
    if given:
        raise ConfigError(
            f"{', '.join(given)}: a plan chooses that. Leave it out, or set plan=none and choose yourself."
        )


def _device_of(config: RunConfig) -> torch.device:
    """The device to plan for; a CUDA card need not be there."""
    if config.device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        return torch.device("cuda")
    return find_device(config.device)


def _with_channels(config: RunConfig, batch: Any) -> RunConfig:
    """The config with each ``in_channels`` filled in, found without memory if the model lets us."""
    try:
        with torch.device("meta"):
            return build_model(config, map_tensors(batch, lambda t: t.to("meta"), strict=False))[1]
    except Exception:
        return build_model(config, batch)[1]  # for real: it works, or the error is the user's


def _labelled_batch(config: RunConfig, train: Any) -> Any:
    """The first batch with labels of all tasks, or the one with labels of most."""
    sampler = MicroBatchSampler(
        len(train), min(config.batch_size, len(train)), shuffle=config.data.shuffle, seed=config.seed
    )
    model = build_model(config)[0]
    labelled, _, batches = most_labelled(
        model.tasks_by_name(),
        sampler,
        lambda indices: [collate(config, [train[i] for part in indices for i in part])],
    )
    if not labelled:
        names = ", ".join(model.enabled_tasks())
        raise ConfigError(f"no label of {names} was found in data.train; there is nothing to plan.")
    return batches[0]
