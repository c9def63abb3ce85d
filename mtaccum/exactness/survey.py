"""The forwards, run twice from the same state: do they repeat, and what do their modules do?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtaccum.batch import batch_size_of
from mtaccum.engine.norms import batch_normalised
from mtaccum.errors import TaskError, first_line, listed
from mtaccum.exactness.probes import CoupledSamples, DynamicShapes, Outputs, drawing_heads, module_names, same
from mtaccum.exactness.reference import losses
from mtaccum.exactness.report import Finding
from mtaccum.exactness.subject import SINGLE_BOUND, Subject
from mtaccum.observe import observed
from mtaccum.state import Snapshot

_OTHER_DTYPE = ("same dtype", "expected scalar type", "expected m1 and m2", "same data type", "but found")


def survey(subject: Subject) -> tuple[list[Finding], bool]:
    """Look at the forwards; sets the subject's precision and bound to what its modules can do.

    Returns:
        What was found, and whether the forwards run at all.
    """
    model, batches = subject.fresh_model(), subject.fresh_window()
    names = module_names(model)
    outputs, shapes = Outputs(), DynamicShapes()

    def forwards() -> list[Tensor]:
        return [
            loss
            for index in subject.telling
            for _, loss in losses(model, batches[index], subject.labels.active_in(index))
        ]

    before = Snapshot(model)
    try:
        with subject.running(model), torch.no_grad():
            in_modules = observed(names, entered=shapes.entered, left=shapes.left)
            with shapes, in_modules, observed(names, left=outputs.left):
                first = forwards()
            outputs.again()
            chunked = drawing_heads(model, subject.options.chunked)
            with before.once_more(), observed(names, left=outputs.left), chunked as drawing:
                second = forwards()
    except (TaskError, RuntimeError, TypeError) as error:
        where = shapes.innermost or "model"
        if subject.double and any(text in str(error) for text in _OTHER_DTYPE):
            subject.double, subject.bound = False, SINGLE_BOUND
            text = f"it doesn't run in double precision, so all is compared in single, to {SINGLE_BOUND:g}."
            found, runs = survey(subject)
            return [Finding("precision", where, text, fault=False), *found], runs
        return [Finding("failure", where, f"its forward failed: {error}")], False
    if outputs.single and subject.double:
        subject.bound = SINGLE_BOUND
    subject.drawing = frozenset(drawing)
    return [*_computed(subject, outputs, same(first, second)), *_unpredictable(names, shapes)], True


def _computed(subject: Subject, outputs: Outputs, same_losses: bool) -> list[Finding]:
    """What the two runs show of precision and randomness."""
    found = []
    if outputs.single and subject.double:
        text = f"it computes in less than double precision, so all is held to the bound {SINGLE_BOUND:g}."
        found.append(Finding("precision", outputs.single[0], text, fault=False))
    if outputs.different or outputs.missed:
        found.append(_different((outputs.different or [str(outputs.missed)])[0]))
    elif not same_losses:
        found.append(_different("a loss"))
    for name in sorted(subject.drawing):
        text = (
            "its head draws random numbers: in chunks it draws others than for the whole micro-batch, as "
            "with another seed. It was compared in evaluation mode."
        )
        found.append(Finding("randomness", name, text, fault=False))
    return found


def _unpredictable(names: Mapping[nn.Module, str], shapes: DynamicShapes) -> list[Finding]:
    """Modules whose memory can't be predicted."""
    texts = [
        (name or "a loss", f"{operation} depends on values, so its memory can't be predicted, only measured.")
        for name, operation in shapes.found.items()
    ]
    texts += [
        (name, "a recurrent layer: its memory can't be predicted, only measured.")
        for module, name in names.items()
        if isinstance(module, nn.RNNBase | nn.RNNCellBase)
    ]
    return [Finding("memory", name, text, fault=False) for name, text in texts]


def _different(where: str) -> Finding:
    return Finding(
        "randomness",
        where,
        "it gives something else when it runs again from the same state: it draws from a generator of its "
        "own (torch.Generator, numpy.random.default_rng) or keeps state that is no buffer, so a repeat "
        "(sequential, recompute) goes wrong. Draw from PyTorch's, NumPy's or Python's global generator, and "
        "register state as buffers.",
    )


def coupled_samples(subject: Subject) -> list[Finding]:
    """Layers in which the output of one sample depends on others: BatchNorm, and whatever else does."""
    model, batches = subject.fresh_model(), subject.fresh_window()
    index = max(subject.telling, key=lambda i: batch_size_of(batches[i]))
    probe = CoupledSamples(batch_size_of(batches[index]))
    found = []
    with subject.running(model), torch.enable_grad():
        names = [
            layer
            for node in subject.reached_nodes
            for layer in batch_normalised(model.own_modules()[node], prefix=node)
        ]
        try:
            with probe.looking(model):
                for _ in losses(model, batches[index], subject.labels.active_in(index)):
                    pass
        except (TaskError, RuntimeError) as error:
            text = f"not looked for: {first_line(error)}"
            found.append(Finding("coupled samples", "model", text, fault=False))
    names = list(dict.fromkeys([*probe.found, *names]))
    chunked = [name for name in names if name.split(".")[0] in subject.options.chunked]
    if chunked:
        text = (
            "the output of one sample depends on the others in its micro-batch, and the head takes that in "
            "chunks, so the gradient is not that of the whole. Leave the task out of chunks, or use a layer "
            "that doesn't couple samples (GroupNorm, LayerNorm)."
        )
        found.append(Finding("coupled samples", listed(chunked), text))
        names = [name for name in names if name not in chunked]
    if not names:
        return found
    several = subject.micro_batches > 1
    text = (
        f"the output of one sample depends on the others in its micro-batch, so with accumulate="
        f"{subject.micro_batches} the training is not that of the whole batch. Use accumulate=1, "
        f"batchnorm=freeze if it is BatchNorm, or a layer that doesn't (GroupNorm, LayerNorm)."
        if several
        else "the output of one sample depends on the others: exact with accumulate=1, as here, only."
    )
    return [*found, Finding("coupled samples", listed(names), text, fault=several)]
