"""Segmentation and classification: integer labels, some of them ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum.batch import Field, check_field
from mtaccum.errors import BatchError, ConfigError
from mtaccum.model.heads import DenseHead, PooledHead
from mtaccum.tasks.base import check_weight
from mtaccum.tasks.colours import paint_classes
from mtaccum.tasks.labelled import Labelled, own_or_builtin, resize
from mtaccum.tasks.registry import register_task

if TYPE_CHECKING:
    from torchmetrics import Metric

# torchmetrics is imported where metrics are made: training needs none, and the import takes seconds.


class _Classes(Labelled):
    """What segmentation and classification share: integer labels, ignored ones, class weights."""

    class_weights: Tensor | None

    def __init__(
        self,
        head: nn.Module,
        target: Field,
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
        for number in class_weights or ():
            check_weight("each of class_weights", number)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label_limits = (0, num_classes - 1)
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)

    def _target(self, batch: Any) -> Tensor:
        """Labels (batch, ...) as int64."""
        target = self.labels(batch)
        if target.numel() and target.is_floating_point():
            raise BatchError(
                f"the target {self.target!r} is of {target.dtype}, and must hold the numbers of classes. "
                f"Convert whole ones with .long(); for probabilities of classes write a task of your own."
            )
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
        if not self.has_target(batch):
            return 0
        target = self._target(batch)
        valid = target != self.ignore_index
        if self.class_weights is None:
            return torch.count_nonzero(valid)
        weights = self.class_weights.to(target.device, torch.float64)
        # a label out of range is reported by label_range; here it must not fail first
        return torch.where(valid, weights[target.clamp(0, self.num_classes - 1)], 0.0).sum()

    def label_range(self, batch: Any) -> tuple[Tensor, Tensor] | None:
        target = self._target(batch)
        if target.numel() == 0:
            return None
        labels = torch.where(target == self.ignore_index, 0, target)
        low, high = torch.aminmax(labels)
        return low, high

    def _accuracy(self) -> Metric:
        from torchmetrics.classification import MulticlassAccuracy

        return MulticlassAccuracy(self.num_classes, average="micro", ignore_index=self.ignore_index)

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
        target: Field = "seg",
        size_like: Field | None = None,
        ignore_index: int = 255,
        class_weights: Sequence[float] | None = None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        head = own_or_builtin(head, in_channels, lambda channels: DenseHead(channels, num_classes, hidden))
        super().__init__(head, target, num_classes, class_weights, ignore_index, weight, on, mode)
        if size_like is not None:
            check_field("size_like", size_like)
        self.size_like = size_like

    def forward(self, features: Any, batch: Any) -> Tensor:
        """Logits (batch, num_classes, height, width)."""
        return resize(super().forward(features, batch), batch, self.size_like)

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics.classification import MulticlassJaccardIndex

        miou = MulticlassJaccardIndex(self.num_classes, ignore_index=self.ignore_index)
        return {"miou": miou, "pixel_accuracy": self._accuracy()}

    def draw(self, prediction: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Classes in colours, with ignored labels in grey; None without a target, or if there are no pixels:
        the prediction must be logits (batch, num_classes, h, w), the labels integers (batch, h, w)."""
        if not isinstance(prediction, Tensor) or prediction.dim() != 4 or not self.has_target(batch):
            return None
        target = self.labels(batch)
        if target.dim() != 3 or target.is_floating_point():
            return None
        target = target.long()
        valid = (target != self.ignore_index) & (target >= 0) & (target < self.num_classes)
        return paint_classes(prediction.argmax(dim=1)), paint_classes(target, valid)


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
        target: Field = "cls",
        ignore_index: int = -100,
        class_weights: Sequence[float] | None = None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        head = own_or_builtin(head, in_channels, lambda channels: PooledHead(channels, num_classes, hidden))
        super().__init__(head, target, num_classes, class_weights, ignore_index, weight, on, mode)

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": self._accuracy()}
