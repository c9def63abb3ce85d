"""Kernels of the CPU whose results lie otherwise in memory than those of PyTorch's functions on fake tensors.

Where a result lies as its kernel really leaves it, a later ``flatten`` or ``reshape`` copies where it really
copies. What is listed here was seen by running both; ``tests/unit/memory/test_kernels.py`` does that again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtaccum.observe import OperationObserver

_aten = torch.ops.aten
_Layout = Callable[[Tensor, Any], Tensor]


def _format_of(index: int) -> _Layout:
    """Channels last where that argument is, and without gaps."""

    def layout(result: Tensor, args: Any) -> Tensor:
        return _empty(result, _suggested(args[index]))

    return layout


def _strides_of(index: int) -> _Layout:
    """The dimensions in the order in which that argument has them."""
    return lambda result, args: torch.empty_like(args[index], dtype=result.dtype)


def _plain(result: Tensor, args: Any) -> Tensor:
    """Row by row."""
    return _empty(result, torch.contiguous_format)


def _in_memory_of_input(result: Tensor, args: Any) -> Tensor:
    """In memory that was made as large as the input, and then cut in size."""
    length = max(result.numel(), args[0].numel())
    return torch.empty(length, dtype=result.dtype).as_strided(result.shape, result.stride())


_LAYOUTS: dict[Any, _Layout] = {
    _aten.native_group_norm.default: _format_of(0),
    _aten.native_group_norm_backward.default: _format_of(1),
    _aten.native_batch_norm_backward.default: _format_of(1),
    _aten.native_layer_norm_backward.default: _plain,
    _aten._log_softmax_backward_data.default: _plain,
    _aten.hardsigmoid_backward.default: _strides_of(0),
    _aten.hardswish_backward.default: _strides_of(0),
    _aten.elu_backward.default: _strides_of(0),
    _aten.softplus_backward.default: _strides_of(0),
    _aten.glu_backward.default: _plain,
    _aten.reflection_pad2d_backward.default: _format_of(1),
    _aten.replication_pad2d_backward.default: _format_of(1),
    _aten.channel_shuffle.default: _strides_of(0),
    _aten.roll.default: _strides_of(0),
    _aten.rrelu_with_noise.default: _plain,
    _aten.rrelu_with_noise_backward.default: _plain,
    _aten.col2im.default: _in_memory_of_input,
}


class CpuKernels(OperationObserver):  # type: ignore[no-untyped-call]
    """Inside of a ``FakeTensorMode``: results lie in memory as the CPU's kernels leave them."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = super().run(func, args, kwargs)
        layout = _LAYOUTS.get(func)
        if layout is None:
            return result
        first, *rest = result if isinstance(result, tuple) else (result,)
        if first is not None:  # a gradient that nobody asked for
            first = layout(first, args)
        return (first, *rest) if isinstance(result, tuple) else first


def _empty(like: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, memory_format=memory_format)


def _suggested(tensor: Tensor) -> torch.memory_format:
    for dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=memory_format):
            return torch.contiguous_format if tensor.is_contiguous() else memory_format
    return torch.contiguous_format
