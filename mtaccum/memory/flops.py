"""FLOPs of ops: those of matrix products, convolutions and attention, by PyTorch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtaccum.torch_internals import flop_registry, sdpa_backward_flops, sdpa_flops

_FORMULAS: dict[Any, Callable[..., int]] = flop_registry


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flops(query.shape, key.shape, value.shape))


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = gradient.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flops(*shapes))


# attention on the CPU, which PyTorch's registry leaves out
_ON_CPU: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
    )
    if hasattr(torch.ops.aten, name)
}


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one op, a multiplication and an addition counted as two; 0 for all that
    is no matrix product, convolution or attention."""
    packet = func._overloadpacket
    if packet in _ON_CPU:
        return _ON_CPU[packet](*args, **kwargs)
    formula = _FORMULAS.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
