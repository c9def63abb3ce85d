"""The joint reference: all forwards of a window, one backward. It shares no code with the schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mtaccum.batch import own_view
from mtaccum.engine import StepOptions
from mtaccum.engine.result import sum_of_terms
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.model import ROOT, MultiTaskModel
from mtaccum.state import not_learning
from mtaccum.structure import detach

Gradients = dict[str, Tensor | None]


def joint_gradients(
    model: MultiTaskModel, window: Sequence[Any], counts: WindowCounts, options: StepOptions
) -> Gradients:
    """Gradients by parameter of the sum over tasks of weight * (sum of label losses) / (their number).

    Leaves ``.grad`` None.

    Args:
        options: in whose order the heads run, and so draw random numbers.
    """
    sums: dict[str, Tensor] = {}
    for index, batch in enumerate(window):
        for name, loss in losses(model, batch, options.in_order(counts.labels.active_in(index))):
            weighted = loss * counts.labels.count(name, index)
            sums[name] = sums[name] + weighted if name in sums else weighted
    total = [counts.weights[name] * value / counts.totals[name] for name, value in sums.items()]
    joint = torch.stack([value.to(torch.float64) for value in total]).sum()
    if joint.requires_grad:
        joint.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def losses(model: MultiTaskModel, batch: Any, active: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Each active task's mean loss on a micro-batch with its graph; every node runs once."""
    for name, prediction in predictions(model, batch, active):
        with _kept(model, name):
            yield name, sum_of_terms(model.task(name).loss(prediction, own_view(batch)))


def predictions(model: MultiTaskModel, batch: Any, active: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Each active task's prediction with its graph, in the order of the tree."""
    yield from _walk(model, batch, model.tree(active), {ROOT: model.inputs(batch)})


def _walk(
    model: MultiTaskModel, batch: Any, tree: Mapping[str, Any], features: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    for name, below in tree.items():
        given = features
        if name in model.tasks and model.task(name).mode == "detached":
            given = {node: nest if node == ROOT else detach(nest) for node, nest in features.items()}
        with _kept(model, name):
            output = model.run(name, given, batch)
        if name in model.tasks:
            yield name, output
        yield from _walk(model, batch, below, {**features, name: output})


def _kept(model: MultiTaskModel, name: str) -> AbstractContextManager[None]:
    return not_learning(model.node(name)) if model.is_frozen(name) else nullcontext()


def compare(
    model: MultiTaskModel, gradients: Gradients, reference: Gradients
) -> tuple[dict[str, float], dict[str, str]]:
    """Relative difference per node, and the parameter of each node that differs most.

    A gradient that is there on one side only counts as infinitely different.
    """
    differences: dict[str, float] = {}
    worst: dict[str, str] = {}
    for node in model.own_modules():
        names = [name for name in reference if name.startswith(model.prefix(node))]
        errors = {name: _error(gradients.get(name), reference[name]) for name in names}
        norm = sum(float(g.norm()) ** 2 for n in names if (g := reference[n]) is not None) ** 0.5
        error = sum(value**2 for value in errors.values()) ** 0.5
        differences[node] = error / norm if norm else (0.0 if error == 0 else float("inf"))
        if errors:
            worst[node] = max(errors, key=lambda name: errors[name])
    return differences, worst


def _error(gradient: Tensor | None, reference: Tensor | None) -> float:
    if gradient is None or reference is None:
        present = gradient if reference is None else reference
        return 0.0 if present is None else float("inf")
    difference = gradient.to_dense() - reference.to_dense()
    return float(difference.norm())
