"""What the built-in tasks share: a target they can't do without, a default head, resizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum.batch import Field, check_field, get_field
from mtaccum.errors import BatchError, ConfigError
from mtaccum.structure import describe
from mtaccum.tasks.base import Task


class Labelled(Task):
    """A task that learns from an entry of the batch; arguments as in Task, but ``target`` is needed."""

    target: Field

    def __init__(
        self, head: nn.Module, target: Field, weight: float, on: str | tuple[str, ...], mode: str
    ) -> None:
        if target is None:
            raise ConfigError("target=None is for tasks without labels; name the batch's entry with them.")
        check_field("target", target)
        super().__init__(head, target, weight, on, mode)

    def has_target(self, batch: Any) -> bool:
        """Whether the batch has the entry, and it is not None."""
        return get_field(batch, self.target, None) is not None

    def labels(self, batch: Any) -> Tensor:
        """The batch's entry with the labels.

        Raises:
            BatchError: the batch has no such entry, or it isn't a tensor.
        """
        target = get_field(batch, self.target)
        if not isinstance(target, Tensor):
            raise BatchError(
                f"the target {self.target!r} is {describe(target)}, and must be one tensor. Make it one with "
                f"torch.as_tensor, where the batch is made."
            )
        return target


def own_or_builtin(
    given: nn.Module | None, in_channels: int | None, make: Callable[[int], nn.Module]
) -> nn.Module:
    """The user's head if there is one, otherwise the built-in one."""
    if given is not None:
        return given
    if in_channels is None:
        raise ConfigError("give either head=, a module of your own, or in_channels=, for the built-in head.")
    return make(in_channels)


def resize(prediction: Tensor, batch: Any, size_like: Field | None) -> Tensor:
    """A dense prediction (batch, channels, h, w), bilinearly resized to the height and width of the
    batch's entry ``size_like``; unchanged if that is None."""
    if size_like is None:
        return prediction
    size = get_field(batch, size_like).shape[-2:]
    if prediction.shape[-2:] == size:
        return prediction
    return F.interpolate(prediction, size=size, mode="bilinear", align_corners=False)
