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

from mtaccum import Engine, InexactWarning, MultiTaskModel, StepOptions, split_batch
from mtaccum.engine import SCHEDULES
from mtaccum.memory import measure_step
from mtaccum.planning import Plan, budget_of, plan_training

__all__ = ["find_plan_of", "measure_predictions", "plan_and_run", "ways_of"]

MICRO_BATCHES = (1, 4)


def ways_of(subject: Subject) -> Iterator[tuple[StepOptions, int]]:
    """Options of a step and its number of micro-batches: each schedule, with and without recompute, in one
    and in four micro-batches."""
    for schedule, segments, number in product(SCHEDULES, ((), subject.segments), MICRO_BATCHES):
        yield subject.options.changed({"schedule": schedule, "recompute": segments}), number


def measure_predictions(spec: Spec) -> list[dict[str, Any]]:
    """A row for each optimizer and way of running a step."""
    subject = subject_of(spec)
    rows = []
    for optimizer_name in subject.optimizers:
        training = subject.fake(optimizer_name)
        model, optimizer = subject.real(optimizer_name)
        # what is measured are later steps, with the optimizer's state
        step(subject, model, optimizer, subject.options, 1)
        for options, accumulate in ways_of(subject):
            predicted = training.predict(options, accumulate)
            measured = step(subject, model, optimizer, options, accumulate)
            rows.append(
                {
                    "model": spec.title,
                    "optimizer": optimizer_name,
                    "schedule": options.schedule,
                    "recompute": list(options.recompute),
                    "accumulate": accumulate,
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


def step(
    subject: Subject, model: MultiTaskModel, optimizer: Optimizer, options: StepOptions, accumulate: int
) -> dict[str, int]:
    """A real step's peak and start in live tensor bytes."""
    engine = Engine(model, optimizer, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)  # BatchNorm in micro-batches: here bytes matter
        report = measure_step(engine, split_batch(subject.batch, accumulate))[1]
    return {"peak_bytes": report.peak_bytes, "start_bytes": report.start_bytes}


def _summed(subject: Subject) -> StepOptions:
    """Of the joint backward."""
    return subject.options.changed({"schedule": "summed"})


def plan_and_run(spec: Spec, optimizer_name: str, part: float) -> dict[str, Any]:
    """The recommended plan for a budget between the smallest peak and that of split, and its real peak.

    Args:
        part: where between the two the budget lies: 0 is the smallest.
    """
    subject = subject_of(spec)
    training = subject.fake(optimizer_name)
    ample = plan_training(training, budget_of(training.predict(_summed(subject)).peak_bytes, "cpu"))
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
    step(subject, model, optimizer, plan.options, plan.accumulate)
    measured = step(subject, model, optimizer, plan.options, plan.accumulate)["peak_bytes"]
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
    summed = training.predict(_summed(subject)).peak_bytes
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
        "plan": f"{plan.describe()}, K={plan.accumulate}",
        "overrides": plan.overrides(),
        "flops_over_summed": plan.flops_over_summed,
    }
