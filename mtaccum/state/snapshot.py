"""Snapshot: buffers and random streams at a moment, so that what ran since can be undone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtaccum.state.random import RandomState
from mtaccum.torch_internals import buffers_of

# those that can be joined and taken apart again
_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}


class Snapshot:
    """Buffers of a model and random state as they were when it was made.

    Args:
        without: modules whose buffers are known not to change.
    """

    def __init__(self, model: nn.Module, without: Collection[nn.Module] = ()) -> None:
        self._random = RandomState()
        spared = set(without)
        modules = (module for module in model.modules() if buffers_of(module) and module not in spared)
        self._own = [(module, dict(buffers_of(module))) for module in modules]
        buffers = [buffer for _, own in self._own for buffer in own.values() if buffer is not None]
        self._copies = _copied(list({id(buffer): buffer for buffer in buffers}.values()))

    def restore(self) -> None:
        """Undo what happened since."""
        self.restore_buffers()
        self._random.restore()

    def restore_buffers(self) -> None:
        """Give all buffers the values that they had."""
        for module, own in self._own:
            buffers_of(module).update(own)
        with torch.no_grad():
            for buffers, joined in self._copies:
                if len(buffers) == 1:
                    buffers[0].copy_(joined)
                    continue
                copies = torch.split(joined, [buffer.numel() for buffer in buffers])
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy.view(buffer.shape))

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


def _copied(buffers: Collection[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Buffers that are alike in device and type, and all their values in one tensor. A ResNet-50 has 159
    small ones; copied one by one, each would be an operation of its own."""
    alike: dict[object, list[Tensor]] = {}
    for buffer in buffers:
        plain = type(buffer) is Tensor and buffer.layout == torch.strided and buffer.dtype in _PLAIN
        alike.setdefault((buffer.device, buffer.dtype) if plain else id(buffer), []).append(buffer)
    with torch.no_grad():
        return [
            (group, torch.cat([b.reshape(-1) for b in group]) if len(group) > 1 else group[0].clone())
            for group in alike.values()
        ]
