"""Segments: which modules of a model a name or pattern in ``recompute`` stands for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mtaccum.errors import ConfigError, unknown_name
from mtaccum.model.tree import MultiTaskModel

_SLICE = re.compile(r"([^\[\]]+)\[(?:(-?\d+)|(-?\d+)?(:)(-?\d+)?|)\]")


@dataclass(frozen=True)
class Segment:
    """A module to recompute, or a run of a Sequential's children.

    Attributes:
        name: as it stands in the model: ``trunk.layer1``, ``trunk.layer3[0:3]``.
        node: the node that it belongs to.
        children: first and behind the last of the run; None: the whole module.
    """

    name: str
    node: str
    module: nn.Module
    children: tuple[int, int] | None = None


def find_segments(model: MultiTaskModel, patterns: Iterable[str]) -> list[Segment]:
    """The segments that names and patterns stand for.

    A name is that of a node (``trunk``, a neck or a task, whose head it then is) or of a module in it
    (``trunk.layer1``, ``seg.0``); ``*`` and ``?`` stand for letters of one name between dots;
    ``trunk.layer3[0:3]`` is a run of a Sequential's children.

    Raises:
        ConfigError: nothing has that name, or it can't be run by itself.
    """
    modules = _modules(model)
    segments: dict[tuple[int, tuple[int, int] | None], Segment] = {}
    for pattern in patterns:
        name, children = _sliced(pattern)
        found = {n: entry for n, entry in modules.items() if _matches(n, name)}
        if len(found) > 1:  # a pattern: leave out the lists of modules that it meets
            found = {n: entry for n, entry in found.items() if _has_forward(entry[1])} or found
        if not found:
            raise ConfigError(_unknown(pattern, name, modules))
        for match, (node, module) in found.items():
            segment = _segment(match, node, module, children)
            segments.setdefault((id(segment.module), segment.children), segment)
    _refuse_overlaps(list(segments.values()))
    return list(segments.values())


def _modules(model: MultiTaskModel) -> dict[str, tuple[str, nn.Module]]:
    """All modules and their nodes, by their names in the nodes and by their full names in the model."""
    found: dict[str, tuple[str, nn.Module]] = {}
    for node, module in model.own_modules().items():
        prefixes = [node]
        if node in model.tasks or node in model.necks:
            prefixes.append(f"tasks.{node}.head" if node in model.tasks else f"necks.{node}.module")
        for name, inner in module.named_modules(remove_duplicate=False):
            for prefix in prefixes:
                found[f"{prefix}.{name}" if name else prefix] = node, inner
    return found


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _sliced(pattern: str) -> tuple[str, tuple[int | None, int | None] | None]:
    """``a.b[0:3]`` as ``a.b`` and (0, 3)."""
    match = _SLICE.fullmatch(pattern)
    if match is None:
        if set(pattern) & set("[]"):
            raise ConfigError(
                f"recompute: brackets stand at the end and hold a run of children, as in 'trunk.layer3[0:3]' "
                f"or 'trunk.layer3[2]'; got {pattern!r}."
            )
        return pattern, None
    name, index, start, colon, stop = match.groups()
    if index is not None:
        return name, (int(index), None if int(index) == -1 else int(index) + 1)
    if colon is None:
        raise ConfigError(
            f"recompute: {pattern!r} has empty brackets; write a run as in 'trunk.layer3[0:3]'."
        )
    return name, (None if start is None else int(start), None if stop is None else int(stop))


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _segment(
    name: str, node: str, module: nn.Module, children: tuple[int | None, int | None] | None
) -> Segment:
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"recompute: {name!r} is a ScriptModule, whose forward can't be replaced.")
    if children is None:
        if not _has_forward(module):
            raise ConfigError(
                f"recompute: {name!r} is a {type(module).__name__}, which has no forward of its own. Name "
                f"what is in it: '{name}.*'."
            )
        return Segment(name, node, module)
    own = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    if not isinstance(module, nn.Sequential) or own:
        raise ConfigError(
            f"recompute: {name!r} is a {type(module).__name__}; only the children of a torch.nn.Sequential "
            f"run one after the other. Name a child: '{name}.NAME'."
        )
    start, stop, _ = slice(*children).indices(len(module))
    beyond = [n for n in children if n is not None and not -len(module) <= n <= len(module)]
    if start >= stop or beyond:
        raise ConfigError(
            f"recompute: {name!r} has {len(module)} children, numbered from 0; "
            f"[{'' if children[0] is None else children[0]}:{'' if children[1] is None else children[1]}] "
            f"is no run of them."
        )
    return Segment(f"{name}[{start}:{stop}]", node, module, (start, stop))


def _refuse_overlaps(segments: Sequence[Segment]) -> None:
    ends: dict[int, Segment] = {}
    for segment in sorted((s for s in segments if s.children), key=lambda s: (id(s.module), s.children)):
        before = ends.get(id(segment.module))
        if before and before.children and segment.children and segment.children[0] < before.children[1]:
            raise ConfigError(f"recompute: {before.name!r} and {segment.name!r} overlap.")
        ends[id(segment.module)] = segment


def _unknown(pattern: str, name: str, modules: Collection[str]) -> str:
    """What there is below that much of the name as exists."""
    above = name
    while above and above not in modules:
        above = above.rpartition(".")[0]
    depth = above.count(".") + 1 if above else 0
    below = [n for n in modules if n.count(".") == depth and n.startswith(f"{above}." if above else "")]
    return unknown_name("module in recompute:", pattern, below)
