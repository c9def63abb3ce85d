"""The gradients of a schedule against those of the joint backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from mtaccum.errors import FeatureError, InplaceError, TaskError, listed
from mtaccum.exactness.probes import GraphsAlive
from mtaccum.exactness.reference import Gradients, compare, joint_gradients
from mtaccum.exactness.report import Finding
from mtaccum.exactness.subject import Subject
from mtaccum.model import MultiTaskModel


@dataclass
class Comparison:
    """How far each node's gradient is from the reference, what was alive meanwhile, and what to say."""

    findings: list[Finding] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    alive: dict[str, tuple[int, int]] = field(default_factory=dict)


def compare_gradients(subject: Subject) -> Comparison:
    """Run the schedule and the reference from the same state, and compare."""
    result = Comparison()
    model, batches = subject.comparable_model(), subject.fresh_window()
    alive = GraphsAlive(model, batches, subject.options)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            with alive.counting():
                subject.engine(model).accumulate(batches)
        except (TaskError, FeatureError) as error:
            kind = "in-place" if isinstance(error, InplaceError) else "failure"
            result.findings.append(Finding(kind, subject.options.schedule, str(error)))
            return result
    for text in (str(warning.message) for warning in caught):
        if text.startswith("recompute:") or "is frozen" in text:
            result.findings.append(Finding("warning", "engine", text, fault=False))
    own: Gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model = subject.comparable_model()
    try:
        with subject.running(model), torch.enable_grad():
            reference = joint_gradients(model, subject.fresh_window(), subject.counts, subject.options)
    except (TaskError, RuntimeError) as error:  # its one backward can fail where a schedule's don't
        text = f"there is no reference to compare with: {error}"
        result.findings.append(Finding("failure", "joint backward", text))
        return result
    result.differences, worst = compare(model, own, reference)
    result.alive = alive.seen
    result.findings += _unreached(subject, model, reference)
    result.findings += [
        Finding(
            "gradient",
            node,
            f"its gradient differs from the joint backward's by {difference:.1e} (bound {subject.bound:g}), "
            f"most in {worst[node]}. Other findings may say why; or its forward depends on more than inputs, "
            f"parameters, buffers and the global random state.",
        )
        for node, difference in result.differences.items()
        if not difference <= subject.bound
    ]
    result.findings += [
        Finding(
            "graphs alive",
            node,
            f"while it ran, the graphs of {heads} other heads were alive: something keeps their outputs. "
            f"Store detached tensors in modules (x.detach()).",
        )
        for node, (heads, _) in alive.seen.items()
        if heads and subject.options.schedule != "summed"
    ]
    return result


def _unreached(subject: Subject, model: MultiTaskModel, reference: Gradients) -> list[Finding]:
    """Trainable parameters that got no gradient although their tasks ran."""
    excused = [
        model.prefix(node)
        for node in model.own_modules()
        if node not in subject.reached_nodes or (node in model.tasks and model.task(node).mode == "frozen")
    ]
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and reference[name] is None and not name.startswith(tuple(excused))
    ]
    text = "trainable, but no task reaches it. Use it in a forward, remove it, or requires_grad_(False) it."
    return [Finding("unreached parameters", listed(names), text)] if names else []
