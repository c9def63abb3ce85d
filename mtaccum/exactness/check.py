"""check_exactness: a schedule against the joint backward, on the user's model and batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mtaccum.batch import batch_size_of, take_samples
from mtaccum.engine import StepOptions
from mtaccum.engine.checks import check_model
from mtaccum.engine.optimizers import Optimizers
from mtaccum.engine.options import takes_step_options
from mtaccum.engine.window_counts import check_window
from mtaccum.errors import BatchError, ConfigError, OptimizerError
from mtaccum.exactness.counts import check_counts, not_additive
from mtaccum.exactness.gradients import Comparison, compare_gradients
from mtaccum.exactness.report import ExactnessReport, Finding
from mtaccum.exactness.subject import Subject
from mtaccum.exactness.survey import coupled_samples, survey
from mtaccum.model import MultiTaskModel
from mtaccum.state import RandomState

_COMPARED = ("schedule", "recompute", "batchnorm", "head_groups", "chunks")


@takes_step_options
def check_exactness(
    model: MultiTaskModel,
    window: Sequence[Any],
    *,
    options: StepOptions | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    samples: int | None = None,
    device: str | torch.device = "cpu",
    **step_options: Any,
) -> ExactnessReport:
    """Compare a schedule's gradients with those of the joint backward, and look for what may break them.

    Both run in double precision on copies; model, optimizer and random state stay as they are. The joint
    reference keeps all graphs of the window at once, so give it few samples.

        report = check_exactness(model, split_batch(batch, 2), schedule="sequential")
        assert report.exact, report

    Args:
        model: as for ``Engine``.
        window: a list of micro-batches of real data, with labels for every task if possible.
        options, step_options: as for ``Engine``. Compared are ``schedule``, ``recompute``, ``batchnorm``,
            ``head_groups`` and ``chunks``; of others that change what is computed a note says so.
        optimizer: one or several, which together must hold every trainable parameter; None: not checked.
        samples: how many to take of the window, the first ones of each micro-batch; None: all.
        device: where to run.

    Raises:
        ConfigError: an argument that isn't valid.
        BatchError, LabelError: a batch that lacks an entry, a label out of range.
    """
    check_model(model)
    check_window(model, window)
    if not window:
        raise BatchError("the window is empty: give at least one micro-batch.")
    asked = (StepOptions() if options is None else options).changed(step_options)
    compared = StepOptions(**{name: getattr(asked, name) for name in _COMPARED})
    if asked.batchnorm == "sync":  # it would wait for other processes
        compared = compared.changed({"batchnorm": "keep"})
    taken, findings = _take(window, samples)
    findings += _not_compared(asked)
    random = RandomState()
    try:
        subject = Subject(model, taken, torch.device(device), compared, random)
        with warnings.catch_warnings(action="ignore"):  # arguments that aren't valid are the caller's errors
            subject.engine(subject.fresh_model())
        findings += _held(model, Optimizers(optimizer))
        comparison = _compared(subject, findings)
        return ExactnessReport(
            compared.schedule,
            subject.sizes,
            comparison.differences,
            dict.fromkeys(comparison.differences, subject.bound),
            comparison.alive,
            sorted(findings, key=lambda finding: not finding.fault),
        )
    finally:
        random.restore()


def _compared(subject: Subject, findings: list[Finding]) -> Comparison:
    """Look at the forwards, and compare the gradients if they run; adds to the findings."""
    if not subject.reached:
        text = "no task has a label in these samples; take others."
        findings.append(Finding("labels", "window", text))
        return Comparison()
    surveyed, runs = survey(subject)
    findings += surveyed + _idle(subject)
    if not runs:
        return Comparison()
    findings += coupled_samples(subject) + _counts(subject)
    comparison = compare_gradients(subject)
    findings += comparison.findings
    return comparison


def _not_compared(options: StepOptions) -> list[Finding]:
    """Options under which a step computes something else than what was compared."""
    notes = {}
    if options.precision != "fp32":
        notes["precision"] = f"{options.precision} rounds; what is computed was compared in double precision."
    if options.batchnorm == "sync":
        notes["batchnorm"] = "sync was compared as keep: a check runs in one process."
    if options.compile is not False:
        notes["compile"] = "the modules were compared as they are, not compiled."
    if options.offload:
        notes["offload"] = (
            "what is kept for the backward was compared without being moved to the host's memory."
        )
    return [Finding(option, option, message, fault=False) for option, message in notes.items()]


def _take(window: Sequence[Any], samples: int | None) -> tuple[list[Any], list[Finding]]:
    """The first samples of each micro-batch, at least 2 of it, since some layers refuse a single one."""
    if samples is not None and samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}.")
    sizes = [batch_size_of(batch) for batch in window]
    if samples is None or sum(sizes) <= samples:
        return list(window), []
    kept = [min(max(2, samples // len(window)), size) for size in sizes]
    text = f"{sum(kept)} of {sum(sizes)} samples were compared."
    taken = [take_samples(batch, size) for batch, size in zip(window, kept, strict=True)]
    return taken, [Finding("samples", "window", text, fault=False)]


def _held(model: MultiTaskModel, optimizers: Optimizers) -> list[Finding]:
    try:
        if optimizers:
            optimizers.check(model)
    except OptimizerError as error:
        return [Finding("optimizer", optimizers.name, str(error))]
    return []


def _idle(subject: Subject) -> list[Finding]:
    text = "not checked: it has no label in these samples."
    idle = [name for name in subject.labels.counts if name not in subject.reached]
    return [Finding("labels", name, text, fault=False) for name in idle]


def _counts(subject: Subject) -> list[Finding]:
    """Each task on the largest micro-batch in which it has labels."""
    model, batches, sizes = subject.fresh_model(), subject.fresh_window(), subject.sizes
    found = not_additive(model, subject.micro_batches)
    for name in subject.labels.counts:
        if name in subject.reached:
            with_labels = [i for i in range(len(batches)) if name in subject.labels.active_in(i)]
            batch = batches[max(with_labels, key=lambda i: sizes[i])]
            with warnings.catch_warnings(action="ignore"):
                found += check_counts(model, batch, [name], bound=subject.bound)
    return found
