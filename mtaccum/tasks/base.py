"""Task: one objective. Its head, its loss, how many labels it counts, its metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from mtaccum.batch import Field, batch_size_of, call, check_field, get_field
from mtaccum.batch.rows import rows_of
from mtaccum.errors import BatchError, ConfigError, InexactWarning, TaskError, unknown_name
from mtaccum.values import real_number

if TYPE_CHECKING:
    from torchmetrics import Metric

MODES = ("train", "frozen", "detached", "off")
"""Who learns from a task: head and trunk, the trunk alone, the head alone, or nobody."""

Loss = Tensor | Mapping[str, Tensor]


def check_weight(what: str, value: Any) -> None:
    """Refuse a weight of a loss that is no finite number of at least 0."""
    number = real_number(value)
    if number is None or not math.isfinite(number) or number < 0:
        raise ConfigError(
            f"{what} must be a finite number of at least 0, got {value!r}. 0 switches the task off; to "
            f"maximise something, return its negative as the loss."
        )


class Task(nn.Module):
    """One objective of a multi-task model: a head, a loss, a count of labels, metrics.

    Subclass it and write ``loss``; the rest has defaults.

    Args:
        head: the module that turns features into a prediction.
        target: where the labels lie in the batch: a key, an index, ``mtaccum.path(...)`` or a function of the
            batch; a tuple of these for several. None: the task needs no labels (an autoencoder, say), and
            every sample counts.
        weight: factor of this task's loss in the sum; finite, not negative. 0 switches the task off.
        on: name of the trunk or neck whose features the head gets, or a tuple of names on one path of
            the tree, for a tuple of their features. Without a trunk: the inputs.
        mode: ``train``; ``frozen``: the trunk learns from this task, its head doesn't; ``detached``: the
            head learns, the trunk doesn't; ``off``: not run at all.

    Raises:
        ConfigError: a weight that is negative or not finite, or an unknown mode.
    """

    additive: ClassVar[bool] = True
    """Whether the loss is a mean over labels whose number is known beforehand. Losses that aren't (Dice,
    contrastive, matched detection) are exact with one micro-batch only; set this to False for them."""

    label_limits: tuple[float, float] | None = None
    """Smallest and largest valid label, checked against ``label_range`` before the first forward."""

    def __init__(
        self,
        head: nn.Module,
        target: Field | tuple[Field, ...] | None,
        weight: float = 1.0,
        on: str | tuple[str, ...] = "trunk",
        mode: str = "train",
    ) -> None:
        super().__init__()
        if not isinstance(head, nn.Module):
            raise ConfigError(
                f"head must be a torch.nn.Module, got {type(head).__name__}. For a task without "
                f"parameters pass torch.nn.Identity()."
            )
        if target is not None:
            check_field("target", target, several=True)
        self.head = head
        self.target = target
        self.weight = weight
        self.on = (on,) if isinstance(on, str) else tuple(on)
        self.mode = mode

    @property
    def weight(self) -> float:
        """Factor of this task's loss in the sum; may be changed between steps."""
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        check_weight("weight", value)
        self._weight = float(value)

    @property
    def mode(self) -> str:
        """``train``, ``frozen``, ``detached`` or ``off``; may be changed between steps."""
        return self._mode

    @mode.setter
    def mode(self, value: str) -> None:
        if value not in MODES:
            raise ConfigError(unknown_name("task mode", value, MODES))
        self._mode = value

    @property
    def enabled(self) -> bool:
        """Whether training runs this task."""
        return self.mode != "off" and self.weight > 0

    def forward(self, features: Any, batch: Any) -> Any:
        """The prediction.

        Args:
            features: what the node(s) in ``on`` hand on.
            batch: the micro-batch, for masks, decoder inputs, image sizes. In training it holds the
                labels too; at inference only what the caller gave, so don't rely on them.
        """
        return call(self.head, features)

    def loss(self, prediction: Any, batch: Any) -> Loss:
        """The loss as a 0-d tensor: the mean over this micro-batch's valid labels.

        Return a dict of named parts to have each of them logged; their sum is the loss.
        """
        raise TaskError(f"{type(self).__name__} has no loss(): define loss(self, prediction, batch).")

    def count(self, batch: Any) -> Any:
        """How many labels ``loss`` is a mean over (or the sum of their weights); 0: nothing to learn.

        It is called before any forward, where the batch lies. By default the number of samples, or 0
        if the batch lacks the target or it is None. Return a number or a 0-d tensor.

        Raises:
            BatchError: of the default: a target that has not one entry per sample.
        """
        if self.target is None:
            return batch_size_of(batch)
        target = get_field(batch, self.target, None)
        if target is None:
            return 0
        samples = batch_size_of(batch)
        fields = target if isinstance(self.target, tuple) else (target,)
        return min(self._count_of(field, samples) for field in fields)

    def _count_of(self, target: Any, samples: int) -> int:
        """The number of samples, 0 for an empty target; labels of which that may not be the number are
        refused."""
        rows = rows_of(target)
        size = len(target) if isinstance(target, list) else rows and rows.size(target)
        if size not in (None, 0, samples):
            raise BatchError(
                f"the target {self.target!r} has {size} entries in a batch of {samples} samples, so the "
                f"default count(), which counts samples, can't tell over how many labels the loss is a mean. "
                f"Define count(self, batch) in {type(self).__name__}."
            )
        if isinstance(target, Tensor):
            self._warn_of_nan(target)
        return 0 if size == 0 else samples

    def _warn_of_nan(self, target: Tensor) -> None:
        # where the answer costs no wait for a device
        if target.device.type == "cpu" and target.is_floating_point() and target.isnan().any():
            warnings.warn(
                f"the target {self.target!r} of {type(self).__name__} holds NaN, but its count() is the "
                f"default, which counts every sample. If loss() leaves samples out, define count() to match.",
                InexactWarning,
                stacklevel=2,
            )

    def label_range(self, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Smallest and largest valid label in the batch as 0-d tensors, to be held against
        ``label_limits``; None: not checked. Not called where ``count`` is the number 0."""
        return None

    def metrics(self) -> dict[str, Metric]:
        """New torchmetrics objects by name, for one evaluation. The mean loss is always reported too."""
        return {}

    def update_metrics(self, metrics: Mapping[str, Metric], prediction: Any, batch: Any) -> None:
        """Feed one batch to the objects that ``metrics()`` made."""

    def draw(self, prediction: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Pictures for people to look at during the training, of the prediction and of the label.

        Called at evaluations, without a graph, with a batch of few samples that holds the target.

        Returns:
            Two RGB pictures (batch, 3, height, width) with values in [0, 1]. They may differ in height and
            width, and are brought to those of the input by nearest neighbours. None: there are none.
        """
        return None
