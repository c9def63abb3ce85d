"""Stages: what a step is doing at the moment, told to whoever looks on (a memory tracker, say)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class StageObserver(Protocol):
    """Is told of stages while it is ``observing``."""

    def begins(self, node: str, phase: str) -> None:
        """A node begins its ``forward`` or ``backward``, or the ``optimizer`` its ``step``. A head group
        is called ``seg+cls``, and the joint backward of ``summed`` is of ``all tasks``."""

    def ends(self, node: str, phase: str) -> None:
        """It has ended, or failed."""

    def cut(self, leaves: Sequence[Tensor]) -> None:
        """A node's features were detached; ``leaves`` will get the gradients of its children."""


_observers: list[StageObserver] = []


@contextmanager
def observing(observer: StageObserver) -> Iterator[None]:
    """Tell ``observer`` of the stages of all steps that run inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        # by identity: observers that are dataclasses equal each other where they have heard the same
        del _observers[max(index for index, other in enumerate(_observers) if other is observer)]


@contextmanager
def stage(node: str, phase: str) -> Iterator[None]:
    """Around a node's forward or backward."""
    told = list(_observers)
    for observer in told:
        observer.begins(node, phase)
    try:
        yield
    finally:
        for observer in told:
            observer.ends(node, phase)


def announce_cut(leaves: Sequence[Tensor]) -> None:
    """Say which tensors will get the gradient of a node's features."""
    for observer in _observers:
        observer.cut(leaves)
