"""Notices: what of a window is worth saying, each kind once.

Before it is trained on, what makes its gradient differ from that of the whole batch; afterwards, what it
didn't reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mtaccum.batch import get_field
from mtaccum.engine.norms import batch_normalised
from mtaccum.engine.options import StepOptions
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import InexactWarning, listed, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel import Ranks
from mtaccum.structure import describe

_ABSENT = object()


class Notices:
    """Looks at each window, and warns of each kind once."""

    def __init__(self, model: MultiTaskModel, options: StepOptions, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._repeats = options.schedule == "sequential"  # a shared node's backward runs once per task
        self._checks = {"additive": self._not_additive, "half": self._adds_in_half}
        if options.batchnorm != "freeze":
            self._checks |= {
                "batchnorm": self._normalised_by_micro_batch,
                "frozen": self._frozen_but_normalising,
            }
        self._looked_for_unreached = False
        self._without_target: set[str] = set()
        self._onto_others = False

    def before(self, window: Sequence[Any], counts: WindowCounts, *, onto_others: bool = False) -> None:
        """Warn of what makes the gradient of a window inexact, and of targets that it lacks.

        Args:
            onto_others: whether it is added to gradients that are there already.
        """
        self._onto_others = onto_others
        self._look_for_targets(window, counts)
        for kind, check in list(self._checks.items()):
            if message := check(counts):
                del self._checks[kind]
                warn(message, UserWarning if kind == "frozen" else InexactWarning)

    def after(self, counts: WindowCounts) -> None:
        """Warn of what no gradient has reached, after the first window in which all tasks had labels."""
        if self._looked_for_unreached or 0 in counts.labels.totals.values():
            return
        self._looked_for_unreached = True
        if names := unreached_parameters(self._model, counts.totals):
            warn(
                f"no gradient reached {len(names)} trainable parameters, although their tasks have run: "
                f"{listed(names)}. They won't be trained; use them, or requires_grad_(False) them."
            )

    def _look_for_targets(self, window: Sequence[Any], counts: WindowCounts) -> None:
        for name, total in counts.labels.totals.items():
            target = getattr(self._model.task(name), "target", None)
            if total or target is None or not window or name in self._without_target:
                continue
            if all(get_field(batch, target, _ABSENT) is _ABSENT for batch in window):
                self._without_target.add(name)
                warn(
                    f"task {name!r} learns nothing from this window: no micro-batch has its target "
                    f"{target!r}. The first one is {describe(window[0])}."
                )

    def _not_additive(self, counts: WindowCounts) -> str | None:
        names = [name for name in counts.labels.counts if not self._model.task(name).additive]
        if not names or (split := self._split(counts)) is None:
            return None
        return (
            f"the loss of {', '.join(names)} is not a mean over labels (additive = False): with {split} its "
            f"gradient is not that of the whole batch. Use one micro-batch, on one rank, for exact gradients."
        )

    def _normalised_by_micro_batch(self, counts: WindowCounts) -> str | None:
        split = self._split(counts)
        nodes = () if split is None else self._model.own_modules()
        names = [layer for node in nodes for layer in self._batch_normalised(counts, node)]
        if counts.labels.micro_batches <= 1:  # ranks that synchronise see the whole batch
            names = [name for name in names if not isinstance(self._layer(name), nn.SyncBatchNorm)]
        if not names:
            return None
        return (
            f"BatchNorm normalises by what it sees, one of {split}, not by the whole batch: {listed(names)}. "
            f"Choose batchnorm='freeze' (normalise by the running statistics), layers that don't couple "
            f"samples (GroupNorm, LayerNorm), or larger micro-batches; or keep it: the gradients are exact "
            f"for this normalisation."
        )

    def _layer(self, name: str) -> nn.Module:
        """Of a node, by a name that begins with the node's."""
        node, _, inside = name.partition(".")
        return self._model.own_modules()[node].get_submodule(inside)

    def _frozen_but_normalising(self, counts: WindowCounts) -> str | None:
        frozen = [name for name in self._model.own_modules() if self._model.is_frozen(name)]
        layers = {name: found for name in frozen if (found := self._batch_normalised(counts, name))}
        if not layers:
            return None
        names = [layer for found in layers.values() for layer in found]
        return (
            f"{listed(list(layers))} is frozen, so its running statistics stay, but its BatchNorm layers are "
            f"in training mode and normalise by the micro-batch: {listed(names)}. For what evaluation sees "
            f"call .eval() on it, or choose batchnorm='freeze'."
        )

    def _batch_normalised(self, counts: WindowCounts, node: str) -> list[str]:
        """The layers of a node that normalise by the micro-batch, if it runs."""
        if not counts.labels.passes(self._model.tasks_below(node)):
            return []
        return batch_normalised(self._model.own_modules()[node], prefix=node)

    def _adds_in_half(self, counts: WindowCounts) -> str | None:
        learned = [total for total in counts.totals.values() if total]
        several = self._onto_others or (self._repeats and len(learned) > 1)
        if counts.labels.micro_batches <= 1 and not several:
            return None
        named = self._model.named_parameters()
        half = [n for n, p in named if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
        if not half:
            return None
        return (
            f"gradients of parameters in 16 bits are added up in 16 bits, which loses small ones: "
            f"{listed(half)}. Keep the parameters in float32 and choose precision='bf16', which casts where "
            f"that is safe."
        )

    def _split(self, counts: WindowCounts) -> str | None:
        """What a batch is split into; None: nothing."""
        if self._ranks.world_size > 1:
            return f"the micro-batches of {self._ranks.world_size} ranks"
        number = counts.labels.micro_batches
        return f"{number} micro-batches" if number > 1 else None


def unreached_parameters(model: MultiTaskModel, totals: Mapping[str, float]) -> list[str]:
    """Trainable parameters without a gradient after a window, in nodes that were to learn from it."""
    taught = model.taught_by(name for name, total in totals.items() if total > 0)
    learning = tuple(map(model.prefix, taught))
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None and name.startswith(learning)
    ]
