"""Recompute: parts of a model that keep no graph, and run once more for their backward.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; here with PyTorch's non-reentrant checkpoint
and a replay, so that dropout and buffers are as if the part ran once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtaccum.engine.parts import Part, find_parts
from mtaccum.engine.replay import Replay
from mtaccum.errors import InplaceError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.structure import tensors_of

Forward = Callable[..., Any]


def recomputed(
    function: Forward, module: nn.Module | None, name: str, ran: set[str] | None = None
) -> Forward:
    """``function``, to be run once more for the backward instead of keeping its graph.

    Args:
        module: what the function runs, whose buffers are replayed; None if that isn't known.
        name: for error messages.
        ran: gets the name added when the function runs.

    Raises:
        InplaceError: (when run) something wrote into its inputs, so that they can't be used again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if ran is not None:
            ran.add(name)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        inputs = _Inputs(name, tensors_of((args, kwargs), strict=False))
        replay = Replay()

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return replay.first(module), _Again(replay, inputs)

        output = checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )
        inputs.check("writes in place into its inputs")
        return output

    return run


class _Again(AbstractContextManager[None]):
    """Around the second run; a class, since several backwards through one graph enter it several times."""

    def __init__(self, replay: Replay, inputs: _Inputs) -> None:
        self._replay, self._inputs = replay, inputs
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._inputs.check("has inputs that were written into after it ran")
        self._stack.enter_context(self._replay.repeat())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _Inputs:
    """The state of a part's inputs, which must be the same when it runs again."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._name = name
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def check(self, what: str) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise InplaceError(
                f"{self._name!r} {what}, so it can't be run again. Recompute a larger part, or take the "
                f"operation out of place: nn.ReLU() instead of nn.ReLU(inplace=True), x = x + y instead of "
                f"x += y."
            )


class Recompute:
    """The parts of a model that are recomputed, while windows run.

    Args:
        patterns: as ``find_parts`` takes them.
    """

    def __init__(self, model: MultiTaskModel, patterns: Sequence[str]) -> None:
        self.parts = find_parts(model, patterns)
        self._ran: set[str] = set()
        self._warned: set[str] = set()

    @contextmanager
    def running(self, passes: Mapping[str, int]) -> Iterator[None]:
        """Let the parts be recomputed wherever they run inside; afterwards they are as they were.

        Args:
            passes: for each node how often it will run. A part that doesn't run although its node does is
                warned of: it isn't called as a module, so naming it has no effect.
        """
        runs: dict[int, list[Part]] = {}
        with ExitStack() as stack:
            for part in self.parts:
                if part.children is not None:
                    runs.setdefault(id(part.module), []).append(part)
            for group in runs.values():
                stack.enter_context(replaced_forward(group[0].module, self._sequence(group)))
            for part in self.parts:
                if part.children is None:
                    forward = recomputed(part.module.forward, part.module, part.name, self._ran)
                    stack.enter_context(replaced_forward(part.module, forward))
            yield
        unused = {p.name for p in self.parts if passes.get(p.node)} - self._ran - self._warned
        if unused:
            self._warned |= unused
            warnings.warn(
                f"recompute: {', '.join(sorted(unused))} did not run as a module of its own, so recomputing "
                f"it has no effect. Name what its parent calls, or the parent.",
                stacklevel=2,
            )

    def _sequence(self, runs: Sequence[Part]) -> Forward:
        """The forward of a Sequential of which some runs of children are recomputed."""
        children = list(runs[0].module.children())
        steps: list[Forward] = []
        position = 0
        for run in sorted(runs, key=lambda part: part.children or (0, 0)):
            assert run.children is not None
            start, stop = run.children
            part = nn.Sequential(*children[start:stop])
            steps += [*children[position:start], recomputed(part, part, run.name, self._ran)]
            position = stop
        steps += children[position:]

        def forward(features: Any) -> Any:
            for step in steps:
                features = step(features)
            return features

        return forward


@contextmanager
def replaced_forward(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Let a module's calls run ``forward``; hooks on the module stay in force."""
    own = vars(module).get("forward")
    try:
        module.forward = forward
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
