"""Window counts: all that is known of a window when its first forward runs.

Its label counts, and what it takes to weigh its losses on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtaccum.engine.label_counts import LabelCounts
from mtaccum.errors import BatchError, ConfigError, listed
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel import Agreement, Ranks


@dataclass(frozen=True)
class WindowCounts:
    """Counts of a window, and the weights and agreements for its step.

    Attributes:
        labels: counts on this rank.
        weights: of the enabled tasks, as they are now.
        agreement: what the ranks agreed on; of a single process its own counts.
        loss_factor: what each loss is multiplied by besides, so that the ranks' gradients become that of the
            summed loss.
    """

    labels: LabelCounts
    weights: Mapping[str, float]
    agreement: Agreement
    loss_factor: int

    @classmethod
    def agreed(cls, labels: LabelCounts, model: MultiTaskModel, ranks: Ranks) -> WindowCounts:
        """Counts with what the other ranks have. To be called on all ranks, for each window."""
        weights = {name: model.task(name).weight for name in labels.counts}
        agreement = ranks.agree(weights, labels.totals, labels.active)
        return cls(labels, weights, agreement, ranks.world_size if ranks.averages else 1)

    @property
    def totals(self) -> Mapping[str, float]:
        """For each enabled task its count in the window, on all ranks; 0 if it is idle."""
        return self.agreement.totals

    @property
    def running(self) -> Sequence[Sequence[str]]:
        """For each micro-batch the tasks whose heads run on this rank."""
        return self.agreement.running

    def passes(self, model: MultiTaskModel) -> dict[str, int]:
        """For each node how often it runs in the window: in so many micro-batches, or chunks of them."""
        labels = self.labels
        return {
            node: labels.head_passes(node)
            if node in labels.chunk_counts
            else labels.passes(model.tasks_below(node))
            for node in model.own_modules()
        }

    def scale(self, task: str, micro_batch: int, chunk: int | None = None) -> float:
        """Factor of a task's mean loss over a micro-batch, or over a chunk of one: weight * count / count in
        the window.

        Written so that K equal whole counts give exactly weight / K.
        """
        share = self.totals[task] / self.labels.count(task, micro_batch, chunk)
        return self.loss_factor * self.weights[task] / share


def check_window(model: MultiTaskModel, window: Sequence[Any]) -> None:
    """Refuse a batch given in place of a window of batches."""
    if not isinstance(window, list):
        raise BatchError(
            f"a window is a list of micro-batches, got {type(window).__name__}. For a single batch: [batch]; "
            f"to split one: split_batch(batch, K)."
        )
    if model.reads_fields and any(isinstance(batch, Tensor) for batch in window):
        raise BatchError(
            "a window is a list of micro-batches, but this list holds tensors: it looks like a batch. Wrap "
            "it: [batch]."
        )


def check_labels(model: MultiTaskModel, counts: Any, micro_batches: int, chunked: Collection[str]) -> None:
    """Refuse counts that are of another window, of other tasks, or without those of the chunks."""
    if not isinstance(counts, LabelCounts):
        raise ConfigError(
            f"counts must be LabelCounts, as Engine.count_labels gives, got {type(counts).__name__}."
        )
    tasks = model.enabled_tasks()
    lengths = {len(numbers) for numbers in counts.counts.values()}
    wanted = set(tasks), {*tasks} & {*chunked}, {micro_batches} if tasks else set()
    if (set(counts.counts), set(counts.chunk_counts), lengths) != wanted:
        raise ConfigError(
            f"the counts are of {_described(counts.micro_batches, counts.counts, counts.chunk_counts)}, but "
            f"the step of {_described(micro_batches, tasks, chunked)}. Make them by this engine's "
            f"count_labels(window), after tasks are switched on or off."
        )


def _described(micro_batches: int, tasks: Collection[str], chunked: Collection[str]) -> str:
    those = f", of which {listed(sorted(chunked))} in chunks" if chunked else ""
    return f"{micro_batches} micro-batches and the tasks {listed(sorted(tasks))}{those}"
