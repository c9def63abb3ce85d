"""torch.compile, node by node: what the engine does between nodes is never traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mtaccum.engine.lever import Lever
from mtaccum.engine.options import StepOptions
from mtaccum.engine.recompute import replaced
from mtaccum.engine.segments import Segment, find_segments
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import ConfigError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.torch_internals import children_of


class Compiled(Lever):
    """The compiled forwards of nodes and segments.

    Raises:
        ConfigError: options that torch.compile doesn't take.
    """

    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        given = options.compile
        if given is False:
            return
        arguments = {} if given is True else dict(given)
        for module in compiled_modules(model, find_segments(model, options.recompute)):
            try:
                compiled = torch.compile(module.forward, **arguments)
            except (TypeError, RuntimeError, ValueError) as error:
                raise ConfigError(f"compile={arguments!r}: {error}") from error
            self._forwards.append((module, compiled))

    @contextmanager
    def running(self, counts: WindowCounts) -> Iterator[None]:
        with ExitStack() as stack:
            if self._forwards:
                from mtaccum.torch_internals import compile_settings  # takes seconds to import

                # PyTorch counts the graphs of a piece of code, and gives up after eight: heads of one class
                # share theirs, and the momentum of running statistics differs with the passes of a window
                limit = max(compile_settings.recompile_limit, 64 * len(self._forwards))
                stack.enter_context(
                    compile_settings.patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit)
                )
            for module, forward in self._forwards:
                stack.enter_context(replaced(module, "forward", forward))
            yield


def compiled_modules(model: MultiTaskModel, segments: Sequence[Segment]) -> list[nn.Module]:
    """What is compiled by itself: the nodes' modules and the recomputed segments, but for those that hold a
    segment, since a checkpoint inside would break the compiled graph."""
    candidates = list(model.own_modules().values())
    for segment in segments:
        children = None if segment.children is None else slice(*segment.children)
        candidates += [segment.module] if children is None else children_of(segment.module)[children]
    sites = [(segment.module, segment.children is not None) for segment in segments]
    found: dict[int, nn.Module] = {}
    for module in candidates:
        inside = {id(m) for m in module.modules()}
        if not any(id(site) in inside and (run or site is not module) for site, run in sites):
            found[id(module)] = module
    return list(found.values())
