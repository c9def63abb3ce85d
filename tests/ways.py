"""Ways to run a step, for tests that go through several."""

from __future__ import annotations

from typing import Any, NamedTuple

from mtaccum import StepOptions


class Way(NamedTuple):
    """A way to run a step: its options, and K, into how many micro-batches the batch is split."""

    options: StepOptions
    accumulate: int = 1

    def __str__(self) -> str:
        given = self.options.given()
        more = [f"{name}={value}" for name, value in given.items() if name != "schedule"]
        return ", ".join([self.options.schedule, f"K={self.accumulate}", *more])


def way_of(schedule: str = "split", accumulate: int = 1, **options: Any) -> Way:
    """A way by K and single options."""
    return Way(StepOptions(schedule, **options), accumulate)
