"""The built-in tasks: segmentation, classification, regression.

Their losses mask by ``torch.where`` and weights, never by boolean indexing, whose result has a shape that
depends on the data: that would stall a GPU in every micro-batch and could not be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum.batch import get_field
from mtaccum.errors import ConfigError, TaskError
from mtaccum.model.heads import DenseHead, PooledHead
from mtaccum.tasks.base import Task
from mtaccum.tasks.registry import register_task

if TYPE_CHECKING:
    from torchmetrics import Metric

# torchmetrics is imported where metrics are made: training needs none, and the import takes seconds.


def _head(given: nn.Module | None, in_channels: int | None, make: Any) -> nn.Module:
    if given is not None:
        return given
    if in_channels is None:
        raise ConfigError("give either head=, a module of your own, or in_channels=, for the built-in head.")
    module: nn.Module = make(in_channels)
    return module


def resize(prediction: Tensor, batch: Any, size_like: str | int | None) -> Tensor:
    """A dense prediction (batch, channels, h, w), bilinearly resized to the height and width of the
    batch's entry ``size_like``; unchanged if that is None."""
    if size_like is None:
        return prediction
    size = get_field(batch, size_like).shape[-2:]
    if prediction.shape[-2:] == size:
        return prediction
    return F.interpolate(prediction, size=size, mode="bilinear", align_corners=False)


class _Classes(Task):
    """What segmentation and classification share: integer labels, ignored ones, class weights."""

    class_weights: Tensor | None

    def __init__(
        self,
        head: nn.Module,
        target: str | int,
        num_classes: int,
        class_weights: Sequence[float] | None,
        ignore_index: int,
        weight: float,
        on: str | tuple[str, ...],
        mode: str,
    ) -> None:
        super().__init__(head, target, weight, on, mode)
        if num_classes < 2:
            raise ConfigError(f"num_classes must be at least 2, got {num_classes}.")
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(f"{len(class_weights)} class_weights for {num_classes} classes; give one each.")
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label_limits = (0, num_classes - 1)
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)

    def _target(self, batch: Any) -> Tensor:
        """Labels (batch, ...) as int64."""
        assert self.target is not None
        target: Tensor = get_field(batch, self.target)
        return target.long()

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        """Cross-entropy, the (class-weighted) mean over valid labels.

        Args:
            prediction: logits (batch, num_classes, ...).
            batch: its target holds labels (batch, ...).
        """
        weights = self.class_weights
        if weights is not None:
            weights = weights.to(prediction)
        return F.cross_entropy(
            prediction, self._target(batch), weight=weights, ignore_index=self.ignore_index
        )

    def count(self, batch: Any) -> Any:
        """Number of labels that aren't ``ignore_index``; with class weights, the sum of theirs."""
        if self.target is None or get_field(batch, self.target, None) is None:
            return 0
        target = self._target(batch)
        valid = target != self.ignore_index
        if self.class_weights is None:
            return valid.sum()
        weights = self.class_weights.to(target.device, torch.float64)
        # a label out of range is reported by label_range; here it must not fail first
        return torch.where(valid, weights[target.clamp(0, self.num_classes - 1)], 0.0).sum()

    def label_range(self, batch: Any) -> tuple[Tensor, Tensor] | None:
        target = self._target(batch)
        if target.numel() == 0:
            return None
        labels = torch.where(target == self.ignore_index, 0, target)
        return labels.min(), labels.max()

    def update_metrics(self, metrics: Mapping[str, Metric], prediction: Tensor, batch: Any) -> None:
        labels = prediction.argmax(dim=1)
        for metric in metrics.values():
            metric.update(labels, self._target(batch))


@register_task("segmentation")
class Segmentation(_Classes):
    """A class for each pixel. Loss: cross-entropy. Metrics: ``miou`` and ``pixel_accuracy``.

    Args:
        num_classes: how many classes; labels are 0 to num_classes - 1.
        in_channels: channels of the features, for the built-in head.
        head: a head of your own, (batch, channels, h, w) to logits (batch, num_classes, h', w').
        hidden: width of the built-in head.
        target: the batch's entry with labels (batch, height, width).
        size_like: resize predictions bilinearly to the height and width of this entry of the batch.
        ignore_index: label of pixels that don't count.
        class_weights: one weight per class, for the loss; they count as labels do.
        weight, on, mode: as in Task.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int | None = None,
        head: nn.Module | None = None,
        hidden: int = 64,
        target: str | int = "seg",
        size_like: str | int | None = None,
        ignore_index: int = 255,
        class_weights: Sequence[float] | None = None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        head = _head(head, in_channels, lambda channels: DenseHead(channels, num_classes, hidden))
        super().__init__(head, target, num_classes, class_weights, ignore_index, weight, on, mode)
        self.size_like = size_like

    def forward(self, features: Any, batch: Any) -> Tensor:
        """Logits (batch, num_classes, height, width)."""
        return resize(super().forward(features, batch), batch, self.size_like)

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

        return {
            "miou": MulticlassJaccardIndex(self.num_classes, ignore_index=self.ignore_index),
            "pixel_accuracy": MulticlassAccuracy(
                self.num_classes, average="micro", ignore_index=self.ignore_index
            ),
        }


@register_task("classification")
class Classification(_Classes):
    """One class for each sample. Loss: cross-entropy. Metric: ``accuracy``.

    Args:
        num_classes: how many classes; labels are 0 to num_classes - 1.
        in_channels: channels of the features, for the built-in head, which pools over space.
        head: a head of your own, giving logits (batch, num_classes, ...).
        hidden: width of the built-in head.
        target: the batch's entry with labels (batch, ...).
        ignore_index: label of samples that don't count.
        class_weights: one weight per class, for the loss; they count as labels do.
        weight, on, mode: as in Task.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int | None = None,
        head: nn.Module | None = None,
        hidden: int = 64,
        target: str | int = "cls",
        ignore_index: int = -100,
        class_weights: Sequence[float] | None = None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        head = _head(head, in_channels, lambda channels: PooledHead(channels, num_classes, hidden))
        super().__init__(head, target, num_classes, class_weights, ignore_index, weight, on, mode)

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics.classification import MulticlassAccuracy

        return {
            "accuracy": MulticlassAccuracy(self.num_classes, average="micro", ignore_index=self.ignore_index)
        }


@register_task("regression")
class Regression(Task):
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
        mask: the batch's entry with a boolean mask, broadcastable to the target; True counts.
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
        target: str | int = "depth",
        mask: str | int | None = None,
        criterion: str = "l1",
        size_like: str | int | None = None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        make = DenseHead if dense else PooledHead
        head = _head(head, in_channels, lambda channels: make(channels, out_channels, hidden))
        super().__init__(head, target, weight, on, mode)
        if criterion not in self.criteria:
            raise ConfigError(f"criterion must be one of {', '.join(self.criteria)}, got {criterion!r}.")
        if size_like is not None and not dense:
            raise ConfigError("size_like is for dense predictions; give dense=True with it.")
        self.mask = mask
        self.criterion = criterion
        self.size_like = size_like

    def forward(self, features: Any, batch: Any) -> Tensor:
        """Predictions (batch, out_channels, height, width) if dense, otherwise (batch, out_channels)."""
        return resize(super().forward(features, batch), batch, self.size_like)

    def _target_and_valid(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The target with NaN and masked values replaced by 0, and which values count; same shape."""
        assert self.target is not None
        target = get_field(batch, self.target)
        valid = ~torch.isnan(target)
        if self.mask is not None:
            valid = valid & get_field(batch, self.mask).bool()
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
        if self.target is None or get_field(batch, self.target, None) is None:
            return 0
        return self._target_and_valid(batch)[1].sum()

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics import MeanAbsoluteError

        return {"mae": MeanAbsoluteError()}

    def update_metrics(self, metrics: Mapping[str, Metric], prediction: Tensor, batch: Any) -> None:
        prediction, target, valid = _aligned(prediction, *self._target_and_valid(batch))
        for metric in metrics.values():
            metric.update(prediction[valid], target[valid])


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
