"""The contract of a step, in one place: whatever the options, it does what one joint backward does.

A case is an architecture and a value for each option. There are too many for each run, so the default takes
a few for each architecture, in which every value of an option meets the architecture and, over all of them,
every value of every other option (pairwise testing: most faults need no more than two things to meet).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, groupby, product
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from helpers import (
    SCHEDULE_NAMES,
    RandomState,
    Reference,
    assert_close_gradients,
    assert_equal_states,
    depth_first,
    joint_reference,
    seed_everything,
)
from torch import Tensor, nn

from mtaccum import Engine
from mtaccum.structure import tensors_of

SEED = 3  # of the random numbers in a window


def engine_options(
    schedule: str = "split",
    recompute: Sequence[str] = (),
    head_groups: Sequence[Sequence[str]] = (),
    chunks: dict[str, int] | None = None,
    batchnorm: str = "keep",
) -> dict[str, Any]:
    """The options of a step as ``Engine`` calls them."""
    return {
        "schedule": schedule,
        "recompute": recompute,
        "head_groups": head_groups,
        "chunks": chunks,
        "batchnorm": batchnorm,
    }


# --- cases ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is run. ``head_groups``: whether neighbours share a backward; ``chunks``: into how many the
    heads that can be take their micro-batch; ``recompute``: nothing, the trunk, the architecture's segments,
    or all nodes."""

    architecture: str
    schedule: str
    micro_batches: int
    recompute: str
    head_groups: bool
    chunks: int
    batchnorm: str

    def __str__(self) -> str:
        return "-".join(
            [self.architecture, self.schedule, f"K={self.micro_batches}", self.recompute]
            + ["groups"] * self.head_groups
            + [f"chunks={self.chunks}"] * (self.chunks > 1)
            + [self.batchnorm] * (self.batchnorm != "keep")
        )

    def options(self) -> dict[str, Any]:
        """For ``Engine``."""
        architecture = ARCHITECTURES[self.architecture]
        recompute = {"kept": (), "trunk": ("trunk",), "segments": architecture.segments, "all": ("*",)}
        chunked = chunkable(self.architecture, self.batchnorm) if self.chunks > 1 else ()
        if self.head_groups and chunked:  # a task can't do both
            chunked = chunked[:1]
        groups = neighbours(self.architecture) if self.head_groups else ()
        return engine_options(
            self.schedule,
            recompute[self.recompute],
            [[task for task in group if task not in chunked] for group in groups],
            dict.fromkeys(chunked, self.chunks),
            self.batchnorm,
        )

    def makes_sense(self) -> bool:
        """Whether the engine takes it, and each of its options has an effect."""
        architecture, options = ARCHITECTURES[self.architecture], self.options()
        if self.head_groups and (self.schedule == "summed" or not options["head_groups"]):
            return False
        if any(len(group) < 2 for group in options["head_groups"]):
            return False
        if self.chunks > 1 and (self.schedule != "split" or not options["chunks"]):
            return False
        if self.batchnorm == "freeze" and not normalises(self.architecture):
            return False
        return not (
            (self.recompute == "trunk" and not architecture.trunk)
            or (self.recompute == "segments" and not architecture.segments)
        )


@cache
def neighbours(name: str) -> list[list[str]]:
    """Tasks on one node that run one after the other anyway, two or more: together they draw the same."""
    model = ARCHITECTURES[name].model()
    runs = groupby(depth_first(model, list(model.tasks)), key=lambda task: model.paths[task][:-1])
    return [group for _, run in runs if len(group := list(run)) > 1]


@cache
def chunkable(name: str, batchnorm: str) -> tuple[str, ...]:
    """Heads that may take a micro-batch in chunks; of those with BatchNorm only where it is frozen."""
    architecture, model = ARCHITECTURES[name], ARCHITECTURES[name].model()
    heads = model.enabled_tasks() if architecture.chunks is None else architecture.chunks
    return tuple(head for head in heads if batchnorm == "freeze" or not batch_norms(model.task(head)))


@cache
def normalises(name: str) -> bool:
    """Whether there is BatchNorm, and all of it can go by running statistics, as ``freeze`` has it."""
    layers = batch_norms(ARCHITECTURES[name].model())
    return bool(layers) and all(layer.running_mean is not None for layer in layers)


def batch_norms(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def all_cases() -> Iterator[Case]:
    """Every combination that makes sense, by architecture."""
    recomputed, yes_or_no = ("kept", "trunk", "segments", "all"), (False, True)
    for name in ARCHITECTURES:
        for values in product(SCHEDULE_NAMES, (1, 3), recomputed, yes_or_no, (1, 2, 100), ("keep", "freeze")):
            if (case := Case(name, *values)).makes_sense():
                yield case


def sampled_cases() -> list[Case]:
    """Some of them, always the same: each pair of values that can meet does."""
    cases = {name: list(of_it) for name, of_it in groupby(all_cases(), key=lambda case: case.architecture)}
    missing = {pair for of_it in cases.values() for case in of_it for pair in pairs(case)}
    chosen = []
    for name, of_it in cases.items():
        random.Random(name).shuffle(of_it)
        while any(name in pair[0] for case in of_it for pair in pairs(case) & missing):
            # those of the architecture itself first: the others can be had elsewhere
            best = max(of_it, key=lambda case: score(case, missing))
            missing -= pairs(best)
            chosen.append(best)
    return chosen


def pairs(case: Case) -> set[tuple[Any, Any]]:
    values = [(getattr(case, field.name), field.name) for field in fields(case)]
    return set(combinations(values, 2))


def score(case: Case, missing: set[tuple[Any, Any]]) -> tuple[int, int]:
    """New pairs with the architecture, and others."""
    new = pairs(case) & missing
    own = sum(first[1] == "architecture" for first, _ in new)
    return own, len(new) - own


# --- what must hold ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a window does by the definition; beside the model also to the inputs and to the generators."""

    reference: Reference
    inputs: list[Tensor | None]
    after: RandomState
    after_python: Any


def start() -> None:
    """The random state that a window begins with."""
    seed_everything(SEED)
    random.seed(SEED)


@cache
def expected(name: str, micro_batches: int, batchnorm: str = "keep") -> Expected:
    """The joint backward of an architecture's window."""
    architecture = ARCHITECTURES[name]
    model, window = architecture.model(), architecture.window(micro_batches)
    if batchnorm == "freeze":
        for layer in batch_norms(model):
            layer.eval()
    start()
    reference = joint_reference(model, window)
    return Expected(reference, gradients_of_inputs(window), RandomState(), random.getstate())


def joint(case: Case) -> Expected:
    return expected(case.architecture, case.micro_batches, case.batchnorm)


def gradients_of_inputs(window: list[Any]) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors_of(window)]


def condition(model: nn.Module) -> Any:
    """What a window must leave as it was: modes, hooks, attributes, what learns, and the weights."""
    modules = [
        (
            name,
            module.training,
            sorted(vars(module)),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ]
    weights = {n: (p.requires_grad, p._version, p.data_ptr()) for n, p in model.named_parameters()}
    return modules, weights


def assert_contract(case: Case) -> None:
    """Gradients (to 1e-12 of each node's norm) and which are None, losses, counts, inputs; buffers and the
    state of all generators to the bit."""
    architecture, what = ARCHITECTURES[case.architecture], joint(case)
    model, window = architecture.model(), architecture.window(case.micro_batches)
    before = condition(model)
    start()

    result = Engine(model, **case.options()).accumulate(window)

    assert condition(model) == before
    untouched = architecture.window(case.micro_batches)
    for own, other in zip(tensors_of(window), tensors_of(untouched), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)  # the batch is the caller's
    assert_close_gradients(model, what.reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), what.reference.buffers)
    assert RandomState() == what.after
    assert random.getstate() == what.after_python
    assert result.counts == architecture.labels(case.micro_batches)
    assert result.losses.keys() == what.reference.losses.keys()
    for task, loss in result.losses.items():
        assert loss.item() == pytest.approx(what.reference.losses[task].item(), rel=1e-12, abs=1e-15)
    for own, other in zip(gradients_of_inputs(window), what.inputs, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def assert_step(case: Case) -> None:
    """A step moves the weights by the joint gradient, and those without one not at all."""
    architecture, what = ARCHITECTURES[case.architecture], joint(case)
    model, window = architecture.model(), architecture.window(case.micro_batches)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # one more, since some architectures have no parameter
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.5)
    start()

    result = Engine(model, optimizer, **case.options(), max_grad_norm=1e9).step(window)

    gradients = what.reference.gradients
    assert result.stepped is bool(what.reference.losses)
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None] or [torch.zeros(())]).norm()
    if result.stepped:
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-12, atol=1e-14, check_dtype=False)
    for key, parameter in model.named_parameters():
        assert parameter.grad is None
        if gradients[key] is None:
            assert torch.equal(parameter, before[key]), key
        else:
            moved = (parameter - before[key] + 0.5 * gradients[key]).abs().max().item()
            assert moved <= 1e-12 * max(norm.item(), before[key].abs().max().item()), key
    assert_equal_states(dict(model.named_buffers()), what.reference.buffers)
