"""Buffers: letting modules work on copies of theirs, so that a forward leaves no trace in them.

Switching ``track_running_stats`` off does not do: only BatchNorm has it, and spectral norm, say, would still
take another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtaccum.state.random import random_state_kept
from mtaccum.torch_internals import buffers_of

Buffers = dict[str, Tensor | None]
Copies = dict[int, tuple[Tensor, Tensor]]  # by the original's id: the original, and its copy


def copied_buffers(
    values: Iterable[tuple[nn.Module, Buffers]], copies: Copies | None = None
) -> list[tuple[nn.Module, Buffers]]:
    """Modules with copies of buffers. One that several modules share is copied once, and noted in ``copies``
    with its original, whose id must stay taken."""
    copies = {} if copies is None else copies
    result = []
    with torch.no_grad():
        for module, buffers in values:
            for value in buffers.values():
                if value is not None and id(value) not in copies:
                    copies[id(value)] = (value, value.clone())
            own = {name: None if value is None else copies[id(value)][1] for name, value in buffers.items()}
            result.append((module, own))
    return result


@contextmanager
def swapped_buffers(values: Iterable[tuple[nn.Module, Buffers]]) -> Iterator[None]:
    """Let modules work on the given buffers; afterwards their own are back, untouched."""
    values = list(values)
    own = [(module, dict(buffers_of(module))) for module, _ in values]
    try:
        for module, buffers in values:
            buffers_of(module).update(buffers)
        yield
    finally:
        for module, buffers in own:
            buffers_of(module).update(buffers)


@contextmanager
def keeping_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let these modules, not those inside of them, work on copies of their buffers."""
    with swapped_buffers(copied_buffers((module, buffers_of(module)) for module in modules)):
        yield


@contextmanager
def not_learning(module: nn.Module) -> Iterator[None]:
    """Let a module pass gradients on without learning: no gradient for its parameters, and its buffers
    (running statistics) stay as they are. Only forwards run inside are concerned, so a parameter that
    another module shares still learns from that one."""
    copies = copied_buffers((part, buffers_of(part)) for part in module.modules())
    with without_gradient(module.parameters()), swapped_buffers(copies):
        yield


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Let a module's forward leave buffers and random state as they are."""
    with random_state_kept(), keeping_buffers(module.modules()):
        yield


@contextmanager
def without_gradient(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters be constants; afterwards those that learned do so again."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
