"""What ``planner_accuracy.py`` measures of a model: predicted and measured peaks, and plans that are run."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

from accuracy_cases import Spec, Subject, subject_of
from torch.optim import Optimizer

from mtaccum import Engine, InexactWarning, MultiTaskModel, split_batch
from mtaccum.engine import SCHEDULES
from mtaccum.memory import How, measure_step
from mtaccum.planning import Plan, budget_of, plan_training

__all__ = ["find_plan_of", "measure_predictions", "plan_and_run", "ways_of"]

MICRO_BATCHES = (1, 4)


def ways_of(subject: Subject) -> Iterator[How]:
    """Each schedule, with and without recompute, in one and in four micro-batches."""
    for schedule, parts, number in product(SCHEDULES, ((), subject.parts), MICRO_BATCHES):
        yield How(schedule, number, parts)


def measure_predictions(spec: Spec) -> list[dict[str, Any]]:
    """A row for each optimizer and way of running a step."""
    subject = subject_of(spec)
    rows = []
    for optimizer_name in subject.optimizers:
        training = subject.fake(optimizer_name)
        model, optimizer = subject.real(optimizer_name)
        step(subject, model, optimizer, How())  # what is measured are later steps, with the optimizer's state
        for how in ways_of(subject):
            predicted = training.predict(how)
            measured = step(subject, model, optimizer, how)
            rows.append(
                {
                    "model": spec.title,
                    "optimizer": optimizer_name,
                    "schedule": how.schedule,
                    "recompute": list(how.recompute),
                    "accumulate": how.accumulate,
                    "predicted_bytes": predicted.peak_bytes,
                    "measured_bytes": measured["peak_bytes"],
                    "predicted_start_bytes": predicted.start_bytes,
                    "measured_start_bytes": measured["start_bytes"],
                    "ratio": predicted.peak_bytes / measured["peak_bytes"],
                    # without what is alive before the step, which is easy to predict
                    "activation_ratio": (predicted.peak_bytes - predicted.start_bytes)
                    / (measured["peak_bytes"] - measured["start_bytes"]),
                }
            )
    return rows


def step(subject: Subject, model: MultiTaskModel, optimizer: Optimizer, how: How) -> dict[str, int]:
    """A real step's peak and start in live tensor bytes."""
    engine = engine_of(subject, model, optimizer, how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)  # BatchNorm in micro-batches: here bytes matter
        report = measure_step(engine, split_batch(subject.batch, how.accumulate))[1]
    return {"peak_bytes": report.peak_bytes, "start_bytes": report.start_bytes}


def engine_of(subject: Subject, model: MultiTaskModel, optimizer: Optimizer, how: How) -> Engine:
    """The engine that runs a step so."""
    return Engine(
        model,
        optimizer,
        schedule=how.schedule,
        recompute=list(how.recompute),
        groups=[list(group) for group in how.groups],
        chunks=dict(how.chunks),
        **subject.options,
    )


def plan_and_run(spec: Spec, optimizer_name: str, part: float) -> dict[str, Any]:
    """The recommended plan for a budget between the smallest peak and that of split, and its real peak.

    Args:
        part: where between the two the budget lies: 0 is the smallest.
    """
    subject = subject_of(spec)
    training = subject.fake(optimizer_name)
    ample = plan_training(training, budget_of(training.predict(How("summed")).peak_bytes, "cpu"))
    smallest, split = ample.smallest.peak_bytes, ample.schedules["split"].peak_bytes
    budget = int(smallest + part * (split - smallest))
    plan = plan_training(training, budget_of(budget, "cpu")).recommended
    row: dict[str, Any] = {
        "model": spec.title,
        "optimizer": optimizer_name,
        "smallest_bytes": smallest,
        "split_bytes": split,
        "budget_bytes": budget,
    }
    if plan is None:
        return {**row, "plan": None}
    model, optimizer = subject.real(optimizer_name)
    step(subject, model, optimizer, plan.how)
    measured = step(subject, model, optimizer, plan.how)["peak_bytes"]
    return {
        **row,
        **_of_plan(plan),
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "over_budget": measured / budget,
    }


def find_plan_of(spec: Spec, part: float) -> dict[str, Any]:
    """What the planner finds for a part of summed's peak, in which time and memory; for a fresh process."""
    subject = subject_of(spec)
    started, cpu_started = time.monotonic(), time.process_time()
    training = subject.fake(next(iter(subject.optimizers)))
    summed = training.predict(How("summed")).peak_bytes
    report = plan_training(training, budget_of(int(part * summed), "cpu"))
    plan, elapsed_s = report.recommended, time.monotonic() - started
    kib = 1 if sys.platform != "darwin" else 1024  # in bytes on macOS
    row = {
        "model": spec.title,
        "summed_bytes": summed,
        "budget_over_summed": part,
        "elapsed_s": elapsed_s,
        "cpu_s": time.process_time() - cpu_started,  # on a busy machine the better number
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // kib,
    }
    if plan is None:
        return {**row, "plan": None}
    return {
        **row,
        **_of_plan(plan),
        "predicted_bytes": plan.peak_bytes,
        "peak_over_summed": plan.peak_bytes / summed,
    }


def _of_plan(plan: Plan) -> dict[str, Any]:
    return {
        "plan": f"{plan.describe()}, K={plan.how.accumulate}",
        "overrides": plan.overrides(),
        "flops_over_summed": plan.flops_over_summed,
    }
