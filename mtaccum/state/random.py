"""Random streams: PyTorch's on each device, NumPy's, Python's, and generators that one names."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RandomState:
    """The state of all generators that a forward may draw from, taken when it is made.

    Args:
        generators: further ones, besides the global ones of PyTorch, NumPy and Python.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._given = [(generator, generator.get_state()) for generator in generators]

    def is_current(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState(generator for generator, _ in self._given)
        (_, keys, *rest), (_, keys_now, *rest_now) = self._numpy, now._numpy
        return (
            all(map(torch.equal, self._tensors(), now._tensors()))
            and np.array_equal(keys, keys_now)
            and (rest, self._python) == (rest_now, now._python)
        )

    def restore(self) -> None:
        """Let all generators go on from here."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        for generator, state in self._given:
            generator.set_state(state)

    def _tensors(self) -> list[Tensor]:
        mps = [] if self._mps is None else [self._mps]
        return [self._torch, *self._cuda, *mps, *(state for _, state in self._given)]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside, afterwards it is as if nothing had been."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
