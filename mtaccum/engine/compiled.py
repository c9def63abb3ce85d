"""torch.compile, node by node: what the engine does between nodes is never traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mtaccum.engine.parts import Part
from mtaccum.engine.recompute import children_of, replaced
from mtaccum.errors import ConfigError
from mtaccum.model.tree import MultiTaskModel


class Compiled:
    """The compiled forwards of modules.

    Args:
        modules: see ``units``; may be empty.
        options: of ``torch.compile``.

    Raises:
        ConfigError: options that torch.compile doesn't take.
    """

    def __init__(self, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        for module in modules:
            try:
                compiled = torch.compile(module.forward, **options)
            except (TypeError, RuntimeError, ValueError) as error:
                raise ConfigError(f"compile={dict(options)!r}: {error}") from error
            self._forwards.append((module, compiled))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the modules run their compiled forwards."""
        with ExitStack() as stack:
            if self._forwards:
                # PyTorch counts the graphs of a piece of code, and gives up after eight: heads of one class
                # share theirs, and the momentum of running statistics differs with the passes of a window
                limit = max(torch._dynamo.config.recompile_limit, 64 * len(self._forwards))
                stack.enter_context(
                    torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit)
                )
            for module, forward in self._forwards:
                stack.enter_context(replaced(module, "forward", forward))
            yield


def units(model: MultiTaskModel, parts: Sequence[Part]) -> list[nn.Module]:
    """What is compiled by itself: the nodes' modules and the recomputed parts, but for those that hold a
    recomputed part, since a checkpoint inside would break the compiled graph."""
    candidates = list(model.own_modules().values())
    for part in parts:
        children = None if part.children is None else slice(*part.children)
        candidates += [part.module] if children is None else children_of(part.module)[children]
    sites = [(part.module, part.children is not None) for part in parts]
    units: dict[int, nn.Module] = {}
    for module in candidates:
        inside = {id(m) for m in module.modules()}
        if not any(id(site) in inside and (run or site is not module) for site, run in sites):
            units[id(module)] = module
    return list(units.values())
