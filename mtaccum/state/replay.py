"""Replay: what runs twice on the same micro-batch must see and change the same as if it ran once.

A second forward would draw other dropout masks and move running statistics once more. So before a first
forward the random state and the buffers are remembered. A repeat draws the same numbers again, and works on
throwaway copies of the buffers as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from mtaccum.observe import any_module_entered
from mtaccum.state.buffers import Buffers, Copies, copied_buffers, swapped_buffers, without_gradient
from mtaccum.state.random import RandomState
from mtaccum.torch_internals import buffers_of, parameters_of


class Replay:
    """Remembers the state before a first forward, and replays it for the repeats: random numbers, buffers,
    and which parameters were frozen."""

    def __init__(self) -> None:
        self._random: RandomState | None = None
        self._buffers: dict[int, tuple[nn.Module, Buffers]] = {}
        self._frozen: list[nn.Parameter] = []
        self._copies: Copies = {}
        self._throwaway: list[tuple[nn.Module, Buffers]] = []

    @contextmanager
    def first(self, module: nn.Module | None = None) -> Iterator[None]:
        """Around the first forward.

        Args:
            module: what the forward runs. None where that isn't known, as in a user's function: then each
                module is remembered when it is called.
        """
        self._random = RandomState()
        if module is not None:
            self._remember(module)
            yield
            return
        with any_module_entered(self._remember):
            yield

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Around the forward of each repeat. Afterwards random state and buffers are as they were before."""
        assert self._random is not None, "repeat before first"
        now = RandomState()
        self._throwaway = copied_buffers(self._buffers.values())
        try:
            self._random.restore()
            with swapped_buffers(self._throwaway), without_gradient(self._frozen):
                yield
        finally:
            now.restore()

    def in_backward(self) -> AbstractContextManager[None]:
        """Around the backward of a repeat: a checkpoint inside the module runs it once more there. Not from
        the repeat on, since in between a head may run a module that it shares, and for the first time."""
        return swapped_buffers(self._throwaway)

    def _remember(self, module: nn.Module) -> None:
        new = [part for part in module.modules() if id(part) not in self._buffers]
        for part, buffers in copied_buffers([(part, buffers_of(part)) for part in new], self._copies):
            self._buffers[id(part)] = (part, buffers)
            self._frozen += [p for p in parameters_of(part).values() if p is not None and not p.requires_grad]
