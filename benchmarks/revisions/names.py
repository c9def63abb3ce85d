"""The package by its names of either side of 0.2.0, which changed many of them outright.

Cases and observations use the new names; here they become those that the imported revision has. Once nobody
compares with a revision before 0.2.0, the functions here are one line each and go where they are called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import mtaccum
import mtaccum.memory
import mtaccum.parallel

__all__ = [
    "OF_TRAINING",
    "alias_modules",
    "check_exactness",
    "count_labels",
    "fake_training",
    "finding_kind",
    "loss_terms",
    "make_engine",
    "pareto_front",
    "plan_options",
    "predict",
    "skipped_steps",
    "why_idle",
]

# Names in modules, old to new. What tests/ imports is found under both.
MODULES = {
    "mtaccum": {"WindowPlan": "LabelCounts"},
    "mtaccum.parallel": {
        "whole": "full_tensor",
        "local": "to_local",
        "is_spread": "is_dtensor",
        "spread_like": "distribute_like",
        "gathered": "unsharded",
    },
}
# Arguments and attributes, new to old.
OLD = {
    "head_groups": "groups",
    "loss_terms": "parts",
    "idle": "skipped",
    "skipped_steps": "skips",
    "count_labels": "plan",
    "pareto_front": "front",
}


def alias_modules() -> None:
    """Let both names of a thing stand for it."""
    for name, renamed in MODULES.items():
        module = importlib.import_module(name)
        for old, new in renamed.items():
            for given, missing in ((old, new), (new, old)):
                if hasattr(module, given) and not hasattr(module, missing):
                    setattr(module, missing, getattr(module, given))


def _attribute(thing: Any, new: str) -> Any:
    return getattr(thing, new) if hasattr(thing, new) else getattr(thing, OLD[new])


def _arguments(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names that a function, or a dataclass, takes."""
    taken = inspect.signature(function).parameters
    return {OLD[n] if OLD.get(n) in taken else n: value for n, value in options.items()}


def make_engine(model: Any, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """An engine with options by their new names."""
    return mtaccum.Engine(model, optimizer, **_arguments(mtaccum.Engine, options))


def count_labels(engine: Any, window: Sequence[Any]) -> Any:
    """The label counts of a window."""
    return _attribute(engine, "count_labels")(window)


def loss_terms(result: Any) -> Mapping[str, Any]:
    """Means of the terms of losses, by ``task/term``."""
    found: Mapping[str, Any] = _attribute(result, "loss_terms")
    return found


def why_idle(result: Any) -> Mapping[str, str]:
    """Why enabled tasks were not run."""
    found: Mapping[str, str] = _attribute(result, "idle")
    return found


def skipped_steps(engine: Any) -> int:
    """How many steps were skipped so far."""
    return int(_attribute(engine, "skipped_steps").total)


OF_TRAINING = ("precision", "batchnorm", "max_grad_norm")


def fake_training(build: Any, batch: Any, options: Mapping[str, Any]) -> Any:
    """A training on fake tensors, with those options that once were a training's and not a step's."""
    training = mtaccum.memory.FakeTraining
    given = {name: options[name] for name in OF_TRAINING if name in options}
    if hasattr(mtaccum.memory, "How"):
        return training(build, batch, **given)
    return training(build, batch, options=_step_options(given))  # type: ignore[call-arg, unused-ignore]


def predict(training: Any, options: Mapping[str, Any], accumulate: int) -> Any:
    """The prediction of a step."""
    if not hasattr(mtaccum.memory, "How"):
        return training.predict(_step_options(options), accumulate)
    kind = mtaccum.memory.How
    given = {n: v for n, v in _arguments(kind, options).items() if n in inspect.signature(kind).parameters}
    if "groups" in given:
        given["groups"] = tuple(map(tuple, given["groups"]))
    if "chunks" in given:
        given["chunks"] = tuple(given["chunks"].items())
    if "recompute" in given:
        given["recompute"] = tuple(given["recompute"])
    return training.predict(kind(accumulate=accumulate, **given))


def _step_options(options: Mapping[str, Any]) -> Any:
    return mtaccum.StepOptions(**options)  # type: ignore[attr-defined, unused-ignore]


def check_exactness(model: Any, window: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A check of a step with some options."""
    return mtaccum.check_exactness(model, window, **_arguments(mtaccum.check_exactness, options))


def finding_kind(finding: Any) -> str:
    """What a finding of a check is about."""
    kind = str(finding.kind)
    return {"orphan parameters": "unreached parameters"}.get(kind, kind)


def pareto_front(report: Any) -> Sequence[Any]:
    """The plans that no other beats."""
    found: Sequence[Any] = _attribute(report, "pareto_front")
    return found


def plan_options(plan: Any) -> dict[str, Any]:
    """A plan's schedule, K and so on, as they are written to JSON."""
    options = plan.how if hasattr(plan, "how") else plan.options
    return {
        "schedule": options.schedule,
        "accumulate": (options if hasattr(plan, "how") else plan).accumulate,
        "recompute": list(options.recompute),
        "head groups": [list(group) for group in _attribute(options, "head_groups")],
        "chunks": dict(options.chunks),
        "offload": options.offload,
    }
