"""Random streams: PyTorch's on each device, NumPy's, Python's, and generators that one names."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

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

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, as a checkpoint holds them."""
        kind, keys, *rest = self._numpy
        return {
            "torch": self._torch,
            "cuda": list(self._cuda),
            "mps": self._mps,
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
            "python": list(self._python),
            "given": [state for _, state in self._given],
        }

    @classmethod
    def of_state_dict(cls, state: Mapping[str, Any], generators: Iterable[torch.Generator] = ()) -> Self:
        """The state that a ``state_dict`` holds; of devices and generators that aren't here, nothing."""
        result = cls(generators)
        kind, keys, *rest = state["numpy"]
        version, internal, gauss = state["python"]
        result._torch = state["torch"]
        result._numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        result._python = (version, tuple(internal), gauss)
        if len(state["cuda"]) == len(result._cuda):
            result._cuda = state["cuda"]
        if result._mps is not None and state["mps"] is not None:
            result._mps = state["mps"]
        pairs = zip(result._given, state["given"], strict=False)
        result._given = [(generator, saved) for (generator, _), saved in pairs]
        return result

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
