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
    gradient of the features, and that only once the first child's backward has made it.

    Args:
        features: what a node returned, any nest of tensors.
        pending: the features were made without a graph, and their graph will be made later by running
            the node again: collect gradients for all of them.

    Raises:
        FeatureError: the features can't be taken apart, or don't hold what was put into them.
    """

    def __init__(self, features: Any, *, pending: bool = False) -> None:
        originals: list[Tensor] = []  # kept while ids are compared: an id is free again after a death
        leaves: dict[int, Tensor] = {}  # one tensor may stand in several places: it stays one
        self._leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if id(tensor) not in leaves:
                differentiable = tensor.is_floating_point() or tensor.is_complex()
                wanted = tensor.requires_grad or (pending and differentiable)
                leaves[id(tensor)] = tensor.detach().requires_grad_(wanted)
            originals.append(tensor)
            self._leaves.append(leaves[id(tensor)])
            return self._leaves[-1]

        self.features = map_tensors(features, leaf)
        # A container that copies what it is given, or shares its inside with its copy, would lose gradients.
        if not (_holds(self.features, self._leaves) and _holds(features, originals)):
            raise FeatureError(
                f"features {describe(features)} hold a container that doesn't keep the tensors it is given, "
                f"so gradients would be lost at the cut. Return plain tuples, lists or dicts, or register "
                f"its type: mtaccum.register_structure."
            )

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients that the children left, one for each tensor of the features; the detached
        features are let go. A tensor that stands in several places has its gradient at the first."""
        gradients: list[Tensor | None] = []
        seen: set[int] = set()
        for leaf in self._leaves:
            gradients.append(None if id(leaf) in seen else leaf.grad)
            seen.add(id(leaf))
        self.features, self._leaves = None, []
        return gradients


def _holds(nest: Any, tensors: list[Tensor]) -> bool:
    """Whether these very tensors are what the nest holds."""
    found = tensors_of(nest)
    return len(found) == len(tensors) and all(a is b for a, b in zip(found, tensors, strict=True))


def send_back(features: Any, gradients: list[Tensor | None]) -> None:
    """Run the backward of the node that made ``features``, from the gradients collected at its cut.

    Args:
        features: with their graph, of the structure that the cut was made of.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(tensors_of(features), gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        # not through a caller's backward(loss): gradients at a cut are scaled already
        torch.autograd.backward(outputs, given)
