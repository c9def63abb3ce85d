"""DTensors: tensors of which each rank holds a shard. Others pass through what is here as they are."""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import Tensor


def is_dtensor(tensor: Tensor | None) -> bool:
    """Whether each rank holds a shard of a tensor only."""
    # whoever has made one has imported the module, which takes half as long as PyTorch itself
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every rank. To be called on all ranks."""
    return cast(Any, tensor).full_tensor() if is_dtensor(tensor) else tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor sharded as another one is; itself if that is no DTensor."""
    if not is_dtensor(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
