"""Paths: the way from the trunk to each node, where nodes form a tree."""

from __future__ import annotations

from collections.abc import Mapping

from mtaccum.errors import ConfigError, unknown_name

ROOT = "inputs"
"""Under which name nodes that hang on no other find what the model is given."""
TRUNK = "trunk"
"""The name of the trunk's node."""


def paths_of(
    has_trunk: bool, sources: Mapping[str, tuple[str, ...]], necks: set[str]
) -> dict[str, tuple[str, ...]]:
    """For each node the path from the trunk to it; checks that the nodes form a tree."""
    paths: dict[str, tuple[str, ...]] = {ROOT: ()}
    if has_trunk:
        paths[TRUNK] = (TRUNK,)

    def path(name: str, below: tuple[str, ...]) -> tuple[str, ...]:
        if name in paths:
            return paths[name]
        if name in below:
            raise ConfigError(f"necks feed each other in a cycle: {' <- '.join((*below, name))}.")
        on = sources[name]
        for source in on:
            if source in sources and source not in necks:
                raise ConfigError(
                    f"{name!r} is on the task {source!r}. Heads can't feed other nodes: put what they "
                    f"share into a Neck, and both on it."
                )
            if source not in paths and source not in necks:
                known = (set(paths) | necks) - {name}
                raise ConfigError(unknown_name(f"node that {name!r} is on,", source, known))
        deepest = max((path(source, (*below, name)) for source in on), key=len, default=())
        if not on or (off := [source for source in on if source not in (ROOT, *deepest)]):
            raise ConfigError(
                f"{name!r} is on {' and '.join(map(repr, on)) or 'no node'}, which must be nodes on one path "
                f"of the tree" + (f"; {off[0]!r} doesn't lead to {deepest[-1]!r}." if on else ".")
            )
        paths[name] = (*deepest, name)
        return paths[name]

    for name in sources:
        path(name, ())
    return paths
