"""Gradients of all parameters: dropping them, and setting them aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


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
