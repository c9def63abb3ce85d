"""Copies of a model and its batches in double precision, which leave the originals as they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.batch import to_device
from mtaccum.model import MultiTaskModel
from mtaccum.structure import map_tensors
from mtaccum.torch_internals import buffers_of, parameters_of

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def copy_of(model: MultiTaskModel, device: torch.device, *, double: bool) -> MultiTaskModel:
    """A copy on a device, with everything that has a fraction in double precision if asked for.

    Not by ``model.double()``: buffers that modules share would be shared no more, and tensors that are
    neither parameters nor buffers would stay in single precision.
    """
    # old-style weight and spectral norm leave a tensor with a graph in an attribute, which can't be copied
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    copied = copy.deepcopy(model, memo)
    copied.zero_grad(set_to_none=True)
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            wide = _WIDE.get(tensor.dtype, tensor.dtype) if double else tensor.dtype
            moved[id(tensor)] = (tensor, tensor.detach().to(device, wide))
        return moved[id(tensor)][1]

    for module in copied.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None:
                parameter.data = move(parameter)
        for places in (buffers_of(module), vars(module)):
            for name, value in places.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    places[name] = move(value)
    return copied


def copies_of(window: Sequence[Any], device: torch.device, *, double: bool) -> list[Any]:
    """Micro-batches on a device, in double precision if asked for; whole numbers stay as they are."""

    def fresh(tensor: Tensor) -> Tensor:
        wide = _WIDE.get(tensor.dtype, tensor.dtype) if double else tensor.dtype
        return tensor.detach().to(wide, copy=True)  # a forward may write into its input

    return [map_tensors(to_device(batch, device), fresh, strict=False) for batch in window]
