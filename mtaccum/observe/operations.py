"""Operations: told of each one that PyTorch dispatches, as it runs or after it has."""

from __future__ import annotations

from typing import Any

from mtaccum.torch_internals import TorchDispatchMode


class OperationObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation inside ``with``; subclasses override one of its two methods."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        self.ran(func, args, kwargs, result)
        return result

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""
        return func(*args, **kwargs)

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run."""
