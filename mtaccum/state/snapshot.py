"""Snapshot: buffers and random streams at a moment, so that what ran since can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mtaccum.state.buffers import copied_buffers
from mtaccum.state.random import RandomState


class Snapshot:
    """Buffers of a model and random state as they were when it was made."""

    def __init__(self, model: nn.Module) -> None:
        self._random = RandomState()
        self._own = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        self._copies = copied_buffers(self._own)

    def restore(self) -> None:
        """Undo what happened since."""
        self.restore_buffers()
        self._random.restore()

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
