"""Values that users give as numbers: Python's own, NumPy's, and tensors without dimensions."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor


def real_number(value: Any) -> float | None:
    """A number as a float; None for what is none, True and False among it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Tensor):
        real = not (value.is_complex() or value.dtype == torch.bool)
        return float(value) if value.dim() == 0 and real else None
    return float(value) if isinstance(value, numbers.Real) else None


def whole_number(value: Any) -> int | None:
    """A whole number of an integer type; None for what is none, True and False among it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Tensor):
        integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return int(value) if value.dim() == 0 and integer else None
    return int(value) if isinstance(value, numbers.Integral) else None
