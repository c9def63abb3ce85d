"""Modules: told before and after each forward of the modules that one wants to look at.

There is one way to look: functions that are called with the module's name. What they make of it (record,
compare, count, measure) is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

Entered = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Left = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


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
                before = module.register_forward_pre_hook(
                    _entering(entered, name), with_kwargs=True, prepend=outermost
                )
                stack.callback(before.remove)
            if left is not None:
                after = module.register_forward_hook(_leaving(left, name), with_kwargs=True)
                stack.callback(after.remove)
        yield


def _entering(entered: Entered, name: str) -> Callable[..., Any]:
    return lambda module, args, kwargs: entered(name, module, args, kwargs)


def _leaving(left: Left, name: str) -> Callable[..., None]:
    return lambda module, args, kwargs, output: left(name, module, args, kwargs, output)


@contextmanager
def any_module_entered(entered: Callable[[nn.Module], None]) -> Iterator[None]:
    """While it lasts, call ``entered(module)`` before the forward of any module, whosever it is."""
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, _: entered(module))
    try:
        yield
    finally:
        hook.remove()
