"""FLOPs of ops: those of matrix products, convolutions and attention, by PyTorch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtaccum.torch_internals import flop_registry, sdpa_backward_flops, sdpa_flops

# attention on the CPU, which PyTorch's registry leaves out: the formula, and how many tensors it goes by
_ON_CPU: dict[str, tuple[Callable[..., int], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flops, 3),  # query, key, value
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flops, 4),  # gradient first
}


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one op, a multiplication and an addition counted as two; 0 for all that
    is no matrix product, convolution or attention."""
    packet = func._overloadpacket
    if packet.__name__ in _ON_CPU:
        formula, tensors = _ON_CPU[packet.__name__]
        return int(formula(*(tensor.shape for tensor in args[:tensors])))
    registered = flop_registry.get(packet)
    return 0 if registered is None else int(registered(*args, **kwargs, out_val=result))
