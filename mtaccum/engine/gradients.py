"""Gradients of all parameters: dropping them, and setting them aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mtaccum.errors import MtaccumError


def drop_gradients(parameters: Sequence[nn.Parameter]) -> int:
    """Set all gradients to None, and tell how many weren't."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        parameter.grad = None
    return len(held)


@contextmanager
def gradients_dropped_on_error(
    parameters: Sequence[nn.Parameter], *, had_some: bool, way_out: str
) -> Iterator[None]:
    """Half a window's gradient is no gradient: after an error there is none, and the error says so.

    Args:
        had_some: whether there were gradients before.
        way_out: what keeps these.
    """
    try:
        yield
    except BaseException as error:
        drop_gradients(parameters)
        if had_some:
            said = f"All gradients are None now, those from before too; {way_out} keeps these."
            if isinstance(error, MtaccumError):
                error.args = (f"{error} {said}", *error.args[1:])
            else:
                error.add_note(said)
        raise


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
