"""Cut: the place where a node's features leave one graph and enter the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtaccum.structure import map_tensors, tensors_of


class Cut:
    """Detached features for a node's children, which collect the children's gradients.

    The detached tensors share their storage with the originals, so a cut costs the memory of one
    gradient of the features, and that only once the first child's backward has made it.

    Args:
        features: what a node returned, any nest of tensors.
        pending: the features were made without a graph, and their graph will be made later by running
            the node again: collect gradients for all of them.
    """

    def __init__(self, features: Any, *, pending: bool = False) -> None:
        leaves: dict[int, Tensor] = {}  # one tensor may stand in several places: it stays one

        def leaf(tensor: Tensor) -> Tensor:
            if id(tensor) not in leaves:
                differentiable = tensor.is_floating_point() or tensor.is_complex()
                wanted = tensor.requires_grad or (pending and differentiable)
                leaves[id(tensor)] = tensor.detach().requires_grad_(wanted)
            return leaves[id(tensor)]

        self.features = map_tensors(features, leaf)

    def send_back(self, features: Any) -> None:
        """Run the backward of the node that made ``features``, from the gradient collected at the cut.

        Args:
            features: the node's features with their graph, of the structure given to the constructor.
        """
        outputs, gradients, seen = [], [], set()
        for output, leaf in zip(tensors_of(features), tensors_of(self.features), strict=True):
            if leaf.grad is not None and output.requires_grad and id(leaf) not in seen:
                seen.add(id(leaf))
                outputs.append(output)
                gradients.append(leaf.grad)
        if outputs:
            # not through a caller's backward(loss): gradients at a cut are scaled already
            torch.autograd.backward(outputs, gradients)
