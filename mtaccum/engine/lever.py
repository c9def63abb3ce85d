"""Lever: one option's effect on the passes of a window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from mtaccum.engine.options import StepOptions
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.model.tree import MultiTaskModel


class Lever(ABC):
    """Made once for a model and the options of its steps.

    Raises:
        ConfigError: (when made) what the option names isn't there.
    """

    @abstractmethod
    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None: ...

    @abstractmethod
    def running(self, counts: WindowCounts) -> AbstractContextManager[None]:
        """Around all passes of a window, their backwards included; afterwards the model is as it was."""

    def ran(self, counts: WindowCounts) -> None:
        """A window has run: say what had no effect."""
