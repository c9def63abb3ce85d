"""What a step asks of the hardware, from the operations that PyTorch dispatches: FLOPs and collectives.

Collectives are operations of the namespace ``c10d`` whoever asks for them: a module in Python, FSDP, or the
reducer of DDP, which is written in C++. What objects are pickled to has another length where a class is
called otherwise, so of collectives of objects the number alone is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Operations"]

_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class Operations(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        flops: of matrix products and convolutions, by PyTorch's own formulas.
        collectives: how many of each kind and size in bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.flops = 0
        self.collectives: Counter[str] = Counter()
        self._in_objects = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=result))
        if func.namespace == "c10d" and not self._in_objects:
            size_bytes = sum(t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor))
            name = func._overloadpacket.__name__.strip("_")
            self.collectives[f"{name} of {size_bytes} bytes"] += 1
        return result

    def __enter__(self) -> Any:
        self._objects = self._noting_objects()
        self._objects.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call, unused-ignore]
        self._objects.__exit__(None, None, None)

    @contextmanager
    def _noting_objects(self) -> Iterator[None]:
        """Count collectives of objects as one each."""
        before = {name: getattr(dist, name) for name in _OF_OBJECTS} if dist.is_available() else {}

        def noting(name: str) -> Any:
            @wraps(before[name])
            def call(*args: Any, **kwargs: Any) -> Any:
                self.collectives[name] += 1
                self._in_objects = True
                try:
                    return before[name](*args, **kwargs)
                finally:
                    self._in_objects = False

            return call

        for name in before:
            setattr(dist, name, noting(name))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(dist, name, function)
