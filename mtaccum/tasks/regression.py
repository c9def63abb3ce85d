"""Regression: numbers per sample or per pixel, some of them missing.

The loss masks by ``torch.where``, never by boolean indexing, whose result has a shape that depends on the
data: that would stall a GPU in every micro-batch and could not be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum.batch import Field, check_field, get_field
from mtaccum.errors import ConfigError, TaskError
from mtaccum.model.heads import DenseHead, PooledHead
from mtaccum.tasks.colours import finite_limits, paint_values
from mtaccum.tasks.labelled import Labelled, own_or_builtin, resize
from mtaccum.tasks.registry import register_task

if TYPE_CHECKING:
    from torchmetrics import Metric

# torchmetrics is imported where metrics are made: training needs none, and the import takes seconds.


@register_task("regression")
class Regression(Labelled):
    """A number for each sample, or for each pixel (``dense``). Loss: L1, MSE or Huber. Metric: ``mae``.

    A target that is NaN doesn't count. Neither does one outside ``mask``.

    Args:
        out_channels: numbers per sample or pixel.
        dense: whether there is a prediction per pixel.
        in_channels: channels of the features, for the built-in head.
        head: a head of your own, giving (batch, out_channels, height, width) or (batch, out_channels).
        hidden: width of the built-in head.
        target: the batch's entry with the target, shaped like the prediction; a scalar one may lack the
            channel dimension where out_channels is 1.
        mask: the batch's entry with a boolean mask shaped like the target, with or without the
            channels; True counts.
        criterion: ``l1``, ``mse`` or ``huber`` (delta 1).
        size_like: resize dense predictions bilinearly to the height and width of this entry of the batch.
        weight, on, mode: as in Task.
    """

    criteria: ClassVar[dict[str, Callable[..., Tensor]]] = {
        "l1": F.l1_loss,
        "mse": F.mse_loss,
        "huber": F.huber_loss,
    }

    def __init__(
        self,
        out_channels: int = 1,
        dense: bool = False,
        in_channels: int | None = None,
        head: nn.Module | None = None,
        hidden: int = 64,
        target: Field = "depth",
        mask: Field | None = None,
        criterion: str = "l1",
        size_like: Field | None = None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        make = DenseHead if dense else PooledHead
        head = own_or_builtin(head, in_channels, lambda channels: make(channels, out_channels, hidden))
        super().__init__(head, target, weight, on, mode)
        if criterion not in self.criteria:
            raise ConfigError(f"criterion must be one of {', '.join(self.criteria)}, got {criterion!r}.")
        if size_like is not None and not dense:
            raise ConfigError("size_like is for dense predictions; give dense=True with it.")
        for what, field in (("mask", mask), ("size_like", size_like)):
            if field is not None:
                check_field(what, field)
        self.dense = dense
        self.mask = mask
        self.criterion = criterion
        self.size_like = size_like

    def forward(self, features: Any, batch: Any) -> Tensor:
        """Predictions (batch, out_channels, height, width) if dense, otherwise (batch, out_channels)."""
        return resize(super().forward(features, batch), batch, self.size_like)

    def _target_and_valid(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The target with NaN and masked values replaced by 0, and which values count; same shape."""
        target = self.labels(batch)
        valid = ~torch.isnan(target)
        if self.mask is not None:
            mask = get_field(batch, self.mask).bool()
            if mask.dim() == target.dim() - 1:
                mask = mask.unsqueeze(1)  # it lacks the channels; broadcasting would align it from the right
            if mask.dim() != target.dim():
                raise TaskError(
                    f"the mask {tuple(mask.shape)} doesn't fit the target {tuple(target.shape)}. Give it the "
                    f"target's shape, with or without the channels."
                )
            valid = valid & mask
        # Before the arithmetic: masking the loss afterwards leaves a finite loss with NaN gradients.
        return torch.where(valid, target, 0), valid

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        """Mean over valid values of the target (batch, out_channels, ...)."""
        target, valid = self._target_and_valid(batch)
        prediction, target, valid = _aligned(prediction, target, valid)
        target = target.to(prediction.dtype)
        losses = self.criteria[self.criterion](torch.where(valid, prediction, 0), target, reduction="none")
        return losses.sum() / valid.sum()

    def count(self, batch: Any) -> Any:
        """Number of values of the target that are neither NaN nor masked."""
        if not self.has_target(batch):
            return 0
        return self._target_and_valid(batch)[1].sum()

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics import MeanAbsoluteError

        return {"mae": MeanAbsoluteError()}

    def update_metrics(self, metrics: Mapping[str, Metric], prediction: Tensor, batch: Any) -> None:
        prediction, target, valid = _aligned(prediction, *self._target_and_valid(batch))
        for metric in metrics.values():
            metric.update(prediction[valid], target[valid])

    def draw(self, prediction: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """The first channel in colours, with labels that don't count in grey; None without a target, or if
        there are no pixels.

        A sample's prediction and label share their scale, from the smallest to the largest label that counts.
        Where labels don't span one, it is that of prediction and label together.
        """
        if not self.dense or not isinstance(prediction, Tensor) or not self.has_target(batch):
            return None
        target, valid = self._target_and_valid(batch)
        if not {prediction.dim(), target.dim()} <= {3, 4}:
            return None
        prediction, label = _first_channel(prediction).float(), _first_channel(target).float()
        valid = _first_channel(valid)
        low, high = finite_limits(label, valid)
        least, largest = finite_limits(prediction)
        flat = ~(low < high)
        low = torch.where(flat, torch.minimum(low, least), low)
        high = torch.where(flat, torch.maximum(high, largest), high)
        return paint_values(prediction, low, high), paint_values(label, low, high, valid)


def _first_channel(pixels: Tensor) -> Tensor:
    """(batch, height, width) of (batch, channels, height, width); unchanged if there are no channels."""
    return pixels[:, 0] if pixels.dim() == 4 else pixels


def _aligned(prediction: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give the target the channel dimension that it lacks; refuse what would broadcast by accident."""
    if prediction.dim() == target.dim() + 1 and prediction.shape[1] == 1:
        target, valid = target.unsqueeze(1), valid.unsqueeze(1)
    if prediction.shape != target.shape:
        raise TaskError(
            f"the prediction {tuple(prediction.shape)} and the target {tuple(target.shape)} differ in shape. "
            f"Give the head as many outputs as the target has, and dense tasks a size_like."
        )
    return prediction, target, valid
