"""A single process: it has all gradients already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from mtaccum.errors import warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.collectives import Collectives
from mtaccum.parallel.ranks import Ranks


class SingleProcess(Ranks):
    """Trains by itself.

    Args:
        on_purpose: whether that was asked for, so that it may be one of several processes; otherwise it is
            refused to train beside others.
    """

    kind: ClassVar[str] = "none"

    def __init__(self, *, on_purpose: bool = True) -> None:
        super().__init__(Collectives())
        self._on_purpose = on_purpose

    def check(self, model: MultiTaskModel, options: Any, scaler: Any) -> None:
        if options.comm_hook != "none":
            warn(f"comm_hook={options.comm_hook!r} has no effect in a single process: no gradient travels.")

    def before_step(self, model: MultiTaskModel) -> None:
        if not self._on_purpose:
            super().before_step(model)

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing is left to do."""
