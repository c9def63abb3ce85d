"""Cases on one process: architectures x schedules x K x recompute, and the engine's options."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from revisions.observe import Case
from revisions.option_cases import option_cases

__all__ = ["single_cases"]

SCHEDULES = ("summed", "sequential", "split")
ACCUMULATE = (1, 3)


def single_cases(names: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    """All of them, or of architectures those named.

    Args:
        quick: of schedules, K and what is recomputed any two values meet, on each architecture or on
            several together; otherwise all do on each.
    """
    yield from architecture_cases(names, quick)
    yield from option_cases()


def architecture_cases(names: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    known = importlib.import_module("architectures").ARCHITECTURES
    for number, name in enumerate(known if names is None else names):
        architecture = known[name]
        build, batch = architecture.model, partial(architecture.batch, 6, 0)
        learns = next(build().parameters(), None) is not None
        for recompute, schedule, accumulate in _meetings(architecture.recomputes(), number, quick):
            yield Case(
                kind="architectures",
                name=f"{name}, {schedule}, K={accumulate}, recompute {'+'.join(recompute) or 'nothing'}",
                build=build,
                window=partial(_window, architecture, accumulate),
                options={"schedule": schedule, "recompute": recompute},
                batch=batch if learns else None,
                accumulate=accumulate,
            )


def _window(architecture: Any, accumulate: int, _rank: int) -> list[Any]:
    window: list[Any] = architecture.window(accumulate)
    return window


def _meetings(
    recomputes: Sequence[tuple[str, ...]], number: int, quick: bool
) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """What is recomputed, schedule and K: all combinations, or three in which all pairs meet over time."""
    if quick:
        for index, schedule in enumerate(SCHEDULES):
            recompute = recomputes[(index + number // 2) % len(recomputes)]
            yield recompute, schedule, ACCUMULATE[(index + number) % len(ACCUMULATE)]
        return
    for recompute in recomputes:
        for schedule in SCHEDULES:
            for accumulate in ACCUMULATE:
                yield recompute, schedule, accumulate
