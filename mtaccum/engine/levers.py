"""Levers: what the options of a step change around its passes, each in one place.

A lever is made once for an engine, and entered around all passes of each window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch.autograd.graph import save_on_cpu

from mtaccum.engine.compiled import Compiled
from mtaccum.engine.lever import Lever
from mtaccum.engine.norms import Norms
from mtaccum.engine.options import StepOptions
from mtaccum.engine.recompute import Recompute
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.model.tree import MultiTaskModel


class Offload(Lever):
    """Saved activations in the host's memory."""

    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None:
        self._offload = options.offload

    def running(self, counts: WindowCounts) -> AbstractContextManager[None]:
        return save_on_cpu(pin_memory=True) if self._offload else nullcontext()


# in the order in which they are entered
LEVERS: Sequence[type[Lever]] = [Norms, Compiled, Recompute, Offload]


class Levers:
    """All of them, for one model and its options."""

    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None:
        self._levers = [lever(model, options) for lever in LEVERS]

    @contextmanager
    def running(self, counts: WindowCounts) -> Iterator[None]:
        """Around all passes of a window."""
        with ExitStack() as stack:
            for lever in self._levers:
                stack.enter_context(lever.running(counts))
            yield

    def ran(self, counts: WindowCounts) -> None:
        for lever in self._levers:
            lever.ran(counts)
