"""What makes a window's gradient differ from that of the whole batch, said once, before it is trained on."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from mtaccum.engine.norms import batch_normalised
from mtaccum.engine.replay import is_frozen
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import InexactWarning, listed
from mtaccum.model.tree import MultiTaskModel


class Inexactness:
    """Looks at each window, and warns of each kind of inexactness once.

    Args:
        freezes: whether BatchNorm layers are frozen while windows run.
        repeats: whether a shared node's backward runs once per task.
    """

    def __init__(self, model: MultiTaskModel, *, freezes: bool, repeats: bool) -> None:
        self._model = model
        self._checks = {
            "additive": self._not_additive,
            "half": self._adds_in_half if repeats else self._accumulates_in_half,
        }
        if not freezes:
            self._checks |= {"batchnorm": self._normalised_by_part, "frozen": self._frozen_but_normalising}

    def warn(self, plan: WindowPlan, stacklevel: int) -> None:
        """Warn of what is new in a window; ``stacklevel`` as for ``warnings.warn``."""
        for kind, check in list(self._checks.items()):
            if message := check(plan):
                del self._checks[kind]
                category = UserWarning if kind == "frozen" else InexactWarning
                warnings.warn(message, category, stacklevel=stacklevel + 1)

    def _not_additive(self, plan: WindowPlan) -> str | None:
        names = [name for name in plan.counts if not self._model.task(name).additive]
        if not names or (cut := _cut(plan)) is None:
            return None
        return (
            f"the loss of {', '.join(names)} is not a mean over labels (additive = False): with {cut} its "
            f"gradient is not that of the whole batch. Use one micro-batch, on one rank, for exact gradients."
        )

    def _normalised_by_part(self, plan: WindowPlan) -> str | None:
        cut = _cut(plan)
        nodes = () if cut is None else self._model.own_modules()
        names = [layer for node in nodes for layer in self._batch_normalised(plan, node)]
        if plan.micro_batches <= 1:  # ranks that synchronise see the whole batch
            names = [name for name in names if not isinstance(self._layer(name), nn.SyncBatchNorm)]
        if not names:
            return None
        return (
            f"BatchNorm normalises by what it sees, one of {cut}, not by the whole batch: {listed(names)}. "
            f"Choose batchnorm='freeze' (normalise by the running statistics), layers that don't couple "
            f"samples (GroupNorm, LayerNorm), or larger micro-batches; or keep it: the gradients are exact "
            f"for this normalisation."
        )

    def _layer(self, name: str) -> nn.Module:
        """Of a node, by a name that begins with the node's."""
        node, _, inside = name.partition(".")
        return self._model.own_modules()[node].get_submodule(inside)

    def _frozen_but_normalising(self, plan: WindowPlan) -> str | None:
        frozen = [name for name in self._model.own_modules() if is_frozen(self._model.node(name))]
        layers = {name: found for name in frozen if (found := self._batch_normalised(plan, name))}
        if not layers:
            return None
        names = [layer for found in layers.values() for layer in found]
        return (
            f"{listed(list(layers))} is frozen, so its running statistics stay, but its BatchNorm layers are "
            f"in training mode and normalise by the micro-batch: {listed(names)}. For what evaluation sees "
            f"call .eval() on it, or choose batchnorm='freeze'."
        )

    def _batch_normalised(self, plan: WindowPlan, node: str) -> list[str]:
        """The layers of a node that normalise by the micro-batch, if it runs."""
        if not plan.passes(self._model.tasks_below(node)):
            return []
        return batch_normalised(self._model.own_modules()[node], prefix=node)

    def _adds_in_half(self, plan: WindowPlan) -> str | None:
        return self._accumulates_in_half(plan, several=len([t for t in plan.totals.values() if t]) > 1)

    def _accumulates_in_half(self, plan: WindowPlan, several: bool = False) -> str | None:
        if plan.micro_batches <= 1 and not several:
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


def _cut(plan: WindowPlan) -> str | None:
    """What a batch is cut into; None: nothing."""
    if plan.ranks > 1:
        return f"the micro-batches of {plan.ranks} ranks"
    return f"{plan.micro_batches} micro-batches" if plan.micro_batches > 1 else None
