"""Replay: what runs twice on the same micro-batch must see and change the same as if it ran once.

A second forward would draw other dropout masks and move running statistics once more. So before a first
pass the random state and the buffers are remembered; a repeat draws the same numbers again, and works on
throwaway copies of the buffers as they were. Switching ``track_running_stats`` off instead does not do:
only BatchNorm has it, and normalisation by spectral norm, say, would still take another step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtaccum.tasks.base import Task

Buffers = dict[str, Tensor | None]
Copies = dict[int, tuple[Tensor, Tensor]]


class Replay:
    """Remembers the state before a first pass, and replays it for the repeats: random numbers, buffers, and
    which parameters were frozen."""

    def __init__(self) -> None:
        self._rng: RandomState | None = None
        self._buffers: dict[int, tuple[nn.Module, Buffers]] = {}
        self._frozen: list[nn.Parameter] = []
        self._copies: Copies = {}
        self._throwaway: list[tuple[nn.Module, Buffers]] = []

    @contextmanager
    def first(self, module: nn.Module | None = None) -> Iterator[None]:
        """Around the first pass.

        Args:
            module: what the pass runs. None where that isn't known, as in a user's function: then each
                module is remembered when it is called, by a hook on all modules.
        """
        self._rng = RandomState()
        if module is not None:
            self._remember(module)
            yield
            return
        hook = nn.modules.module.register_module_forward_pre_hook(
            lambda called, _args: self._remember(called)
        )
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Around the forward of each repeat. Afterwards random state and buffers are as they were before."""
        assert self._rng is not None, "repeat before first"
        now = RandomState()
        self._throwaway = _copied(self._buffers.values())
        try:
            self._rng.restore()
            with swapped_buffers(self._throwaway), _without_gradient(self._frozen):
                yield
        finally:
            now.restore()

    def in_backward(self) -> AbstractContextManager[None]:
        """Around the backward of a repeat: a checkpoint inside the module runs it once more there. Not from
        the repeat on, since in between a head may run a module that it shares, and for the first time."""
        return swapped_buffers(self._throwaway)

    def _remember(self, module: nn.Module) -> None:
        new = [part for part in module.modules() if id(part) not in self._buffers]
        for part, buffers in _copied([(part, part._buffers) for part in new], self._copies):
            self._buffers[id(part)] = (part, buffers)
            self._frozen += [p for p in part._parameters.values() if p is not None and not p.requires_grad]


class StateBefore:
    """Buffers and random state as they were when it was made, so that a window can be undone."""

    def __init__(self, model: nn.Module) -> None:
        self._rng = RandomState()
        self._own = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        self._copies = _copied(self._own)

    def restore(self) -> None:
        """Undo what happened since."""
        self.restore_buffers()
        self._rng.restore()

    def restore_buffers(self) -> None:
        """Give all buffers the values that they had."""
        with torch.no_grad():
            for (module, own), (_, copies) in zip(self._own, self._copies, strict=True):
                module._buffers.update(own)
                for name, buffer in own.items():
                    if buffer is not None:
                        buffer.copy_(copies[name])  # type: ignore[arg-type]

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Around a second run of what was run since: from the same state, and leaving none of its own."""
        now = RandomState()
        self.restore()
        try:
            yield
        finally:
            self.restore_buffers()
            now.restore()


@contextmanager
def swapped_buffers(values: Iterable[tuple[nn.Module, Buffers]]) -> Iterator[None]:
    """Let modules work on the given buffers; afterwards their own are back, untouched."""
    values = list(values)
    own = [(module, dict(module._buffers)) for module, _ in values]
    try:
        for module, buffers in values:
            module._buffers.update(buffers)
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Let a module pass gradients on without learning: no gradient for its parameters, and its buffers
    (running statistics) stay as they are. Only forwards run inside are concerned, so a parameter that
    another module shares still learns from that one."""
    copies = _copied((part, part._buffers) for part in module.modules())
    with _without_gradient(module.parameters()), swapped_buffers(copies):
        yield


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Let a module's forward leave buffers and random state as they are."""
    random_state = RandomState()
    try:
        with swapped_buffers(_copied((part, part._buffers) for part in module.modules())):
            yield
    finally:
        random_state.restore()


@contextmanager
def keeping_frozen(nodes: Sequence[nn.Module]) -> Iterator[None]:
    """Around a window: let frozen nodes keep their buffers in backwards too, where a checkpoint of the user's
    own would run them again. What they share with others is left to ``frozen``, forward by forward."""
    fixed = [node for node in nodes if is_frozen(node)]
    learning = {part for node in nodes if node not in fixed for part in node.modules()} if fixed else set()
    parts = [part for node in fixed for part in node.modules() if part not in learning]
    with swapped_buffers(_copied((part, part._buffers) for part in parts)):
        yield


def is_frozen(module: nn.Module) -> bool:
    """Whether a node stays as it is: a task in the mode ``frozen``, or parameters of which none learns."""
    if isinstance(module, Task) and module.mode == "frozen":
        return True
    if any(parameter.requires_grad for parameter in module.parameters()):
        return False
    return next(module.parameters(), None) is not None


@contextmanager
def _without_gradient(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _copied(
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


class RandomState:
    """The state of all generators that a forward may draw from, taken when constructed."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def is_current(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState()
        (_, keys, *rest), (_, keys_now, *rest_now) = self._numpy, now._numpy
        tensors, tensors_now = (
            [state._torch, *state._cuda, *([] if state._mps is None else [state._mps])]
            for state in (self, now)
        )
        return (
            all(map(torch.equal, tensors, tensors_now))
            and np.array_equal(keys, keys_now)
            and (rest, self._python) == (rest_now, now._python)
        )

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
