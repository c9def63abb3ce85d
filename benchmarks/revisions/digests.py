"""Digests: tensors and random states as short texts that are equal if, and only if, every bit is."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["digest", "digests", "random_state", "seed_everything"]


def digest(tensor: Any) -> str | None:
    """Type, shape, hash of all bytes, and for readers the norm; None for None.

    A tensor that is sharded over ranks is gathered: all of them have to ask.
    """
    if tensor is None:
        return None
    values = tensor.detach()
    values = values.full_tensor() if hasattr(values, "full_tensor") else values
    layout = "" if values.layout == torch.strided else f"{values.layout} "
    values = (values.to_dense() if layout else values).as_subclass(Tensor).resolve_conj()
    values = values.contiguous().reshape(-1)
    sha = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    numbers = torch.view_as_real(values) if values.is_complex() else values
    kind = str(values.dtype).removeprefix("torch.")
    return f"{layout}{kind}{list(tensor.shape)} {sha} norm {numbers.double().norm().item():.17g}"


def digests(named: Iterable[tuple[str, Any]]) -> dict[str, str | None]:
    """Digests of tensors, or of None, by name."""
    return {name: digest(tensor) for name, tensor in named}


def seed_everything(seed: int = 3) -> None:
    """The same random numbers from here on."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def random_state() -> dict[str, str]:
    """Digests of the states of the generators of torch, NumPy and Python."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr([np.asarray(part).tobytes() for part in np.random.get_state()]).encode(),
        "python": repr(random.getstate()).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}
