"""Cut: the place where a node's features leave one graph and enter the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtaccum.errors import FeatureError
from mtaccum.structure import describe, map_tensors, tensors_of


class Cut:
    """Detached features for a node's children, which collect the children's gradients.

    The detached tensors share their storage with the originals, so a cut costs the memory of one
    gradient of the features, and that only once the first child's backward has made it. Of the originals
    only their places in the graph are kept, so the features die with their last reader.

    Args:
        features: what a node returned, any nest of tensors.

    Attributes:
        features: the same nest, detached; None once the gradients were sent back.

    Raises:
        FeatureError: the features can't be taken apart, or don't hold what was put into them.
    """

    def __init__(self, features: Any) -> None:
        originals: list[Tensor] = []  # kept while ids are compared: an id is free again after a death
        leaves: dict[int, Tensor] = {}  # one tensor may stand in several places: it stays one
        placed: list[Tensor] = []
        self._crossings: list[tuple[Tensor, Tensor]] = []

        def leaf(tensor: Tensor) -> Tensor:
            if tensor.is_nested and tensor.requires_grad:
                raise FeatureError(
                    "features hold a nested tensor, which collects no gradient at a cut. Use "
                    "schedule='sequential', or hand on padded tensors with a mask."
                )
            if id(tensor) not in leaves:
                leaves[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
                if tensor.requires_grad:
                    self._crossings.append((_way_back(tensor, leaves[id(tensor)]), leaves[id(tensor)]))
            originals.append(tensor)
            placed.append(leaves[id(tensor)])
            return placed[-1]

        self.features = map_tensors(features, leaf)
        # A container that copies what it is given, or shares its inside with its copy, would lose gradients.
        if not (_holds(self.features, placed) and _holds(features, originals)):
            raise FeatureError(
                f"features {describe(features)} hold a container that doesn't keep the tensors it is given, "
                f"so gradients would be lost at the cut. Return plain tuples, lists or dicts, or register "
                f"its type: mtaccum.register_structure."
            )

    @property
    def leaves(self) -> list[Tensor]:
        """The detached tensors that collect a gradient."""
        return [leaf for _, leaf in self._crossings]

    def send_back(self) -> None:
        """Run the backward of the node that made the features, from the gradients collected here."""
        ways = [way for way, leaf in self._crossings if leaf.grad is not None]
        self.features, self._crossings = None, []
        if ways:
            # not through a caller's backward(loss): gradients at a cut are scaled already
            torch.autograd.backward(ways, [torch.empty_like(way) for way in ways])


def _way_back(original: Tensor, leaf: Tensor) -> Tensor:
    with torch.enable_grad():
        # in a list, or it would become an input of the function, whose graph would keep it
        way: Tensor = _Crossing.apply(original, [leaf])  # type: ignore[no-untyped-call, unused-ignore]
        return way


class _Crossing(torch.autograd.Function):
    """From a detached tensor back to its original: a tensor of no bytes, whose backward hands the
    gradient that the detached one has collected to the graph that made the original.

    PyTorch could take graph edges and gradients as they are, but holds what it is given until the end of the
    backward; handed over like this, the gradient is freed as soon as it was used.
    """

    @staticmethod
    def forward(ctx: Any, original: Tensor, leaf: list[Tensor]) -> Tensor:
        ctx.leaf = leaf
        return original.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None]:
        return ctx.leaf.pop().grad, None


def _holds(nest: Any, tensors: list[Tensor]) -> bool:
    """Whether these very tensors are what the nest holds."""
    found = tensors_of(nest)
    return len(found) == len(tensors) and all(a is b for a, b in zip(found, tensors, strict=True))
