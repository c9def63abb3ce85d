"""Observe: what runs in a step, told to whoever looks on: its stages, modules, and operations.

There is one way to look: functions or methods that are called with what runs. What they make of it (record,
compare, count, measure) is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from mtaccum.torch_internals import TorchDispatchMode

FORWARD, BACKWARD, STEP = "forward", "backward", "step"

Entered = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Left = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


# --- stages ---


class StageObserver(Protocol):
    """Is told of stages while it is ``observing``."""

    def begins(self, node: str, phase: str) -> None:
        """A node begins its ``forward`` or ``backward``, or the ``optimizer`` its ``step``. A head group
        is called ``seg+cls``, and the joint backward of ``summed`` is of ``all tasks``."""

    def ends(self, node: str, phase: str) -> None:
        """It has ended, or failed."""

    def cut(self, leaves: Sequence[Tensor]) -> None:
        """A node's features were detached; ``leaves`` will get the gradients of its children."""


_observers: list[StageObserver] = []


@contextmanager
def observing(observer: StageObserver) -> Iterator[None]:
    """Tell ``observer`` of the stages of all steps that run inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        # by identity: observers that are dataclasses equal each other where they have heard the same
        del _observers[max(index for index, other in enumerate(_observers) if other is observer)]


@contextmanager
def stage(node: str, phase: str) -> Iterator[None]:
    """Around a node's forward or backward."""
    told = list(_observers)
    for observer in told:
        observer.begins(node, phase)
    try:
        yield
    finally:
        for observer in told:
            observer.ends(node, phase)


def announce_cut(leaves: Sequence[Tensor]) -> None:
    """Say which tensors will get the gradient of a node's features."""
    for observer in _observers:
        observer.cut(leaves)


# --- modules ---


@contextmanager
def observed(
    modules: Mapping[nn.Module, str],
    *,
    entered: Entered | None = None,
    left: Left | None = None,
    outermost: bool = False,
) -> Iterator[None]:
    """While it lasts, tell of each forward of some modules.

    Args:
        modules: with the names under which they are told of.
        entered: ``entered(name, module, args, kwargs)`` before a forward. Returns None, or the arguments
            ``(args, kwargs)`` that the forward shall get instead.
        left: ``left(name, module, args, kwargs, output)`` after it; not if the forward failed.
        outermost: whether ``entered`` comes before the hooks that the modules have.
    """
    with ExitStack() as stack:
        for module, name in modules.items():
            if entered is not None:
                hook = partial(entered, name)
                before = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=outermost)
                stack.callback(before.remove)
            if left is not None:
                after = module.register_forward_hook(partial(left, name), with_kwargs=True)
                stack.callback(after.remove)
        yield


@contextmanager
def any_module_entered(entered: Callable[[nn.Module], None]) -> Iterator[None]:
    """While it lasts, call ``entered(module)`` before the forward of any module, whosever it is."""
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, _: entered(module))
    try:
        yield
    finally:
        hook.remove()


# --- operations ---


class OperationObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation that PyTorch dispatches inside ``with``; subclasses override ``run``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""
        return func(*args, **kwargs)
