"""Gradients of all parameters together: their norm, clipping, and setting them aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtaccum.parallel.fsdp import is_spread, local, whole


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients together (0-d); 0 if there is none."""
    gradients = [_values(p.grad) for p in parameters if p.grad is not None]
    spread = [gradient for gradient in gradients if is_spread(gradient)]
    if not spread:
        return nn.utils.get_total_norm(gradients)
    norms = [whole(nn.utils.get_total_norm(spread))]
    if whole_ones := [gradient for gradient in gradients if not is_spread(gradient)]:
        norms.append(nn.utils.get_total_norm(whole_ones).to(norms[0]))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients, whose norm is ``norm``, so that it is at most ``max_norm``."""
    learned = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(is_spread(parameter.grad) for parameter in learned):
        nn.utils.clip_grads_with_norm_(learned, max_norm, norm)
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch has it
    for parameter in learned:
        local(parameter.grad).mul_(factor)  # type: ignore[arg-type]


def _values(gradient: Tensor) -> Tensor:
    """A sparse gradient's values, which have its norm."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def drop_gradients(parameters: Sequence[nn.Parameter]) -> int:
    """Set all gradients to None, and tell how many weren't."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        parameter.grad = None
    return len(held)


@contextmanager
def gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients that are there already stay untouched until the new ones are complete."""
    before = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    drop_gradients(parameters)
    try:
        yield
    except BaseException:
        drop_gradients(parameters)
        for parameter, gradient in before:
            parameter.grad = gradient
        raise
    with torch.no_grad():
        for parameter, gradient in before:
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.layout == gradient.layout:
                parameter.grad = gradient.add_(parameter.grad)
            else:  # one of them is sparse
                parameter.grad = gradient + parameter.grad
