"""Cases of what is said about a step rather than done by it: checks of exactness, and plans for a budget."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import mtaccum
from revisions import names
from revisions.observe import Case
from revisions.option_cases import awkward_batches, awkward_model, plain_batches, plain_model

__all__ = ["check_cases"]

CHECKED: tuple[Mapping[str, Any], ...] = (
    {"schedule": "split"},
    {"schedule": "sequential"},
    {"schedule": "split", "recompute": ["trunk"]},
)
PLANNED: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]]]] = {
    "awkward": (awkward_model, partial(awkward_batches, (6,))),
    "plain": (plain_model, partial(plain_batches, (6,))),
}


def check_cases(architectures: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    """All of them; quick: a check of each ninth architecture only, and one search for a plan."""
    known = importlib.import_module("architectures").ARCHITECTURES
    for number, name in enumerate(known if architectures is None else architectures):
        architecture = known[name]
        options = CHECKED[number % (len(CHECKED) if architecture.trunk else 2)]
        if not quick or number % 9 == 0:
            window = partial(_first_micro_batches, architecture)
            report = partial(_check, options)
            label = ", ".join(
                [name, options["schedule"], *(["recomputed"] if "recompute" in options else [])]
            )
            yield Case("checks", label, architecture.model, window, report=report)
    for name, (build, planned) in list(PLANNED.items())[: 1 if quick else None]:
        yield Case("plans", name, build, planned, report=partial(_plan, build))


def _first_micro_batches(architecture: Any, _rank: int) -> list[Any]:
    window: list[Any] = architecture.window(2)
    return window


def _check(options: Mapping[str, Any], model: Any, window: list[Any]) -> dict[str, Any]:
    """The verdict with its numbers; of findings what they are about, since wording may be bettered."""
    report = names.check_exactness(model, window, options)
    return {
        "verdict": report.exact,
        "differences": dict(report.differences),
        "bounds": dict(report.bounds),
        "alive": {node: list(alive) for node, alive in report.alive.items()},
        "findings": [[names.finding_kind(f), f.where, f.fault] for f in report.findings],
    }


def _plan(build: Callable[[], Any], _model: Any, window: list[Any]) -> dict[str, Any]:
    """Plans without a budget, and for one halfway between the smallest peak and that of ``summed``."""
    free = mtaccum.find_plan(build, window[0])
    budget_bytes = (free.smallest.prediction.peak_bytes + free.schedules["summed"].prediction.peak_bytes) // 2
    fitting = mtaccum.find_plan(build, window[0], budget_bytes=budget_bytes)
    return {
        "recommended": _described(fitting.recommended),
        "smallest": _described(free.smallest),
        "pareto front": [_described(plan) for plan in names.pareto_front(fitting)],
        "schedules": {name: _described(plan) for name, plan in fitting.schedules.items()},
    }


def _described(plan: Any) -> dict[str, Any] | None:
    if plan is None:
        return None
    prediction = plan.prediction
    return {
        **names.plan_options(plan),
        "peak bytes": prediction.peak_bytes,
        "FLOPs over summed": plan.flops_over_summed,
        "exactness": int(plan.exactness),
    }
