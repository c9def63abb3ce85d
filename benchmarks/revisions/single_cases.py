"""Cases on one process: architectures x schedules x K x recompute, and the engine's options."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from revisions.observe import Case
from revisions.option_cases import option_cases

__all__ = ["ACCUMULATE", "SCHEDULES", "single_cases"]

SCHEDULES = ("summed", "sequential", "split")
ACCUMULATE = (1, 3)


def single_cases(names: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    """All of them, or of architectures those named.

    Args:
        quick: of schedules, K and what is recomputed any two values meet, on one architecture or another,
            and one step of every second architecture is predicted; otherwise all combinations are run on
            each, and predicted.
    """
    yield from architecture_cases(names, quick)
    yield from option_cases(quick)


def architecture_cases(names: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    known = importlib.import_module("architectures").ARCHITECTURES
    for number, name in enumerate(known if names is None else names):
        architecture = known[name]
        build, batch = architecture.model, partial(architecture.batch, 6, 0)
        predicts = next(build().parameters(), None) is not None
        meetings = _meetings(architecture.recomputes(), number, quick)
        for index, (recompute, schedule, accumulate) in enumerate(meetings):
            yield Case(
                kind="architectures",
                name=f"{name}, {schedule}, K={accumulate}, recompute {'+'.join(recompute) or 'nothing'}",
                build=build,
                window=partial(_window, architecture, accumulate),
                options={"schedule": schedule, "recompute": recompute},
                batch=batch if predicts and (not quick or index == number % 6) else None,
                accumulate=accumulate,
            )


def _window(architecture: Any, accumulate: int, _rank: int) -> list[Any]:
    window: list[Any] = architecture.window(accumulate)
    return window


def _meetings(
    recomputes: Sequence[tuple[str, ...]], number: int, quick: bool
) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """What is recomputed, schedule and K: all combinations, or three in which all pairs meet over time."""
    if not quick:
        yield from product(recomputes, SCHEDULES, ACCUMULATE)
        return
    for index, schedule in enumerate(SCHEDULES):
        recompute = recomputes[(index + number // 2) % len(recomputes)]
        yield recompute, schedule, ACCUMULATE[(index + number) % len(ACCUMULATE)]
