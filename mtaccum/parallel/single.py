"""A single process: it has all gradients already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from mtaccum.errors import ConfigError, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.collectives import Collectives, in_process_group
from mtaccum.parallel.ranks import Ranks


class SingleProcess(Ranks):
    """Trains by itself.

    Args:
        on_purpose: whether that was asked for, so that it may be one of several processes.
    """

    kind: ClassVar[str] = "none"

    def __init__(self, *, on_purpose: bool = False) -> None:
        super().__init__(Collectives())
        self._on_purpose = on_purpose

    def check(self, model: MultiTaskModel, options: Any, scaler: Any) -> None:
        if options.comm_hook != "none":
            warn(f"comm_hook={options.comm_hook!r} has no effect in a single process: no gradient travels.")

    def before_step(self, model: MultiTaskModel) -> None:
        """Refuse to train by itself what was made before there were other ranks."""
        if not self._on_purpose and in_process_group():
            raise ConfigError(
                "the engine was made before the ranks were joined, and would train this one by itself. Make "
                "it inside of mtaccum.parallel.joined(), or with parallel='none'."
            )

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing is left to do."""
