"""One case, run and looked at: what it computes, what it leaves behind, and what it costs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mtaccum import MtaccumError
from mtaccum.memory import measure_peak, measure_step
from mtaccum.structure import tensors_of
from revisions import names
from revisions.digests import digest, digests, random_state, seed_everything
from revisions.operations import Operations

__all__ = ["FAILED", "Case", "observe"]

FAILED, REFUSED = "failed", "refused"


@dataclass(frozen=True)
class Case:
    """Something that both revisions do.

    Attributes:
        kind: under which it is counted: ``architectures``, ``options``, ``ddp``.
        name: all that distinguishes it from others of its kind.
        build: makes the model, the same at each call.
        window: makes the micro-batches of a rank, the same at each call.
        options: of the engine, by their new names.
        steps: whether it steps; otherwise gradients are accumulated, twice.
        call: what is run instead of an engine; takes the model and the window and returns losses by name.
        report: what is asked instead of running anything; takes the same and returns values by quantity.
        counted: whether labels are counted before the step, and the counts handed to it.
        spread: over the ranks, before the optimizer is made.
        batch: makes the batch for which a step is predicted; None: none is.
        accumulate: into how many micro-batches that is split.
    """

    kind: str
    name: str
    build: Callable[[], Any]
    window: Callable[[int], list[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: bool = True
    call: Callable[[Any, list[Any]], Mapping[str, Any]] | None = None
    report: Callable[[Any, list[Any]], Mapping[str, Any]] | None = None
    counted: bool = False
    spread: Callable[[Any], object] | None = None
    batch: Callable[[], Any] | None = None
    accumulate: int = 1


def observe(case: Case, rank: int = 0) -> dict[str, Any]:
    """What came of a case, by quantity. What the package refuses is an observation; anything else that is
    raised is a failure, which is never equal to another."""
    seen: dict[str, Any] = {}
    for look in (_run, _predict):
        try:
            look(case, rank, seen)
        except MtaccumError as error:
            seen[f"{REFUSED}: {look.__name__.strip('_')}"] = type(error).__name__
        except Exception as error:
            seen[FAILED] = f"{type(error).__name__}: {error}"
    return seen


def _run(case: Case, rank: int, seen: dict[str, Any]) -> None:
    model = case.build()
    if case.spread is not None:
        case.spread(model)
    try:
        if case.report is not None:
            seed_everything()
            seen.update(case.report(model, case.window(rank)))
        elif case.call is not None:
            _run_call(case, case.call, model, rank, seen)
        else:
            _run_engine(case, model, rank, seen)
    finally:
        seen["parameters"] = digests(model.named_parameters())
        seen["buffers"] = digests(model.named_buffers())
        seen["random state"] = random_state()


def _run_engine(case: Case, model: Any, rank: int, seen: dict[str, Any]) -> None:
    """Two whole steps, of which the first is looked into and the second measured; or two accumulations."""
    looking = True

    def look(model: nn.Module) -> None:
        if looking:
            seen["gradients"] = _gradients(model)

    hooks = {"on_gradients": look} if case.steps else {}
    with Operations() as made:
        # one that nobody uses, since a model may have none that learn
        held = [*model.parameters(), nn.Parameter(torch.zeros(1))]
        optimizer = torch.optim.AdamW(held, lr=0.01) if case.steps else None
        engine = names.make_engine(model, optimizer, {**case.options, **hooks})
    seen["collectives of an engine"] = dict(made.collectives)
    run = engine.step if case.steps else engine.accumulate
    seed_everything()
    window = case.window(rank)
    with Operations() as first:
        result = run(window, names.count_labels(engine, window) if case.counted else None)
    seen["collectives"] = dict(first.collectives)
    seen["gradients of inputs"] = _gradients_of(window)
    seen["inputs"] = [digest(tensor) for tensor in tensors_of(window, strict=False)]
    _result(seen, engine, result)
    looking = False
    _measure(case, engine, rank, seen)
    if not case.steps:
        seen["gradients"] = _gradients(model)


def _measure(case: Case, engine: Any, rank: int, seen: dict[str, Any]) -> None:
    """Bytes, FLOPs and collectives of a further step; on ranks the least bytes of three, since gloo's threads
    now and then let go of a tensor too late for a peak."""
    reports = []
    for _ in range(3 if dist.is_initialized() else 1):
        window = case.window(rank)
        with _collected(), Operations() as operations:
            reports.append(measure_step(engine, window)[1])
    least = min(reports, key=lambda report: report.peak_bytes)
    seen["start bytes"], seen["peak bytes"] = least.start_bytes, least.peak_bytes
    seen["bytes by kind"] = dict(least.by_kind)
    seen["FLOPs"] = operations.flops
    seen["collectives of a later step"] = dict(operations.collectives)


def _run_call(case: Case, call: Any, model: Any, rank: int, seen: dict[str, Any]) -> None:
    seed_everything()
    with Operations() as operations:
        seen["losses"] = digests(call(model, case.window(rank)).items())
    seen["FLOPs"], seen["collectives"] = operations.flops, dict(operations.collectives)
    window = case.window(rank)
    with _collected():
        existing = [model, *tensors_of(window, strict=False)]
        seen["peak bytes"] = measure_peak(lambda: call(model, window), existing=existing).peak_bytes
    seen["gradients"] = _gradients(model)


def _result(seen: dict[str, Any], engine: Any, result: Any) -> None:
    seen["losses"] = digests(result.losses.items())
    seen["loss terms"] = digests(names.loss_terms(result).items())
    seen["counts"] = dict(result.counts)
    seen["idle"] = sorted(names.why_idle(result))
    seen["grad norm"] = digest(result.grad_norm)
    seen["result"] = [result.micro_batches, result.stepped, result.nonfinite is not None]
    seen["steps"] = [engine.steps, names.skipped_steps(engine)]


def _gradients(model: nn.Module) -> dict[str, str | None]:
    return digests((name, parameter.grad) for name, parameter in model.named_parameters())


def _gradients_of(window: list[Any]) -> list[str | None]:
    return [digest(tensor.grad) for tensor in tensors_of(window, strict=False) if tensor.is_leaf]


class _collected:  # noqa: N801 (used as a context manager only)
    """Without the collector of cycles, which would free what is left to it at another moment each time."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()


_trainings: dict[Any, Any] = {}
_KEPT = 8


def _predict(case: Case, rank: int, seen: dict[str, Any]) -> None:
    """Peak and FLOPs of the step on fake tensors. What is made for that serves further cases, as it does when
    a plan is searched."""
    if case.batch is None:
        return
    key = case.build, case.batch, tuple((n, case.options.get(n)) for n in names.OF_TRAINING)
    if key not in _trainings:
        if len(_trainings) == _KEPT:
            _trainings.clear()
        _trainings[key] = names.fake_training(case.build, case.batch(), case.options)
    prediction = names.predict(_trainings[key], case.options, case.accumulate)
    seen["predicted peak bytes"], seen["predicted FLOPs"] = prediction.peak_bytes, prediction.flops
    seen["predicted bytes by kind"] = dict(prediction.by_kind)
