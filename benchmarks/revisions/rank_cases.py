"""Cases on two ranks: a tree with all that may go wrong between them, by DDP and by FSDP."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import mtaccum.parallel
from revisions.observe import Case
from revisions.single_cases import ACCUMULATE, SCHEDULES

__all__ = ["rank_cases"]

KINDS = ("ddp", "fsdp")
_ALL = ("seg", "cls", "five", "pair", "other", "last")
# What the window of each rank lacks: a number of micro-batches, and labels of some targets.
LACKING: dict[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "the same on both": ((0, ()), (0, ())),
    "one has no batch": ((0, ()), (-9, ())),
    "one has fewer": ((0, ()), (-1, ())),
    "a task idle on one": ((0, ()), (0, ("seg", "other"))),
    "a task idle on both": ((0, ("seg", "pair")), (0, ("seg", "pair"))),
    "each another task": (
        (0, tuple(t for t in _ALL if t != "seg")),
        (0, tuple(t for t in _ALL if t not in ("cls", "pair"))),
    ),
    "no label on one": ((0, ()), (0, _ALL)),
    "no label at all": ((0, _ALL), (0, _ALL)),
}
BOTH: dict[str, Mapping[str, Any]] = {
    "head groups": {"head_groups": [["cls", "alone", "terms"]]},
    "head groups, sequential": {"head_groups": [["alone", "again"]], "schedule": "sequential"},
    "nodes recomputed": {"recompute": ["trunk", "fpn"]},
    "modules recomputed": {"recompute": ["trunk.conv", "seg.conv"], "schedule": "sequential"},
    "clipped": {"max_grad_norm": 0.1},
    "BatchNorm frozen": {"batchnorm": "freeze"},
    "skipping": {"on_nonfinite": "skip"},
}
ONLY_DDP: dict[str, Mapping[str, Any]] = {
    "chunks": {"chunks": {"cls": 2, "again": 3}},
    "not reduced": {"parallel": "none"},
    "head groups of tied heads": {"head_groups": [["terms", "again"]]},
}


def rank_cases(names: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    """All of them, or of architectures those named; quick: not every schedule with each K and window."""
    for kind in KINDS:
        combined = product(LACKING.items(), SCHEDULES, ACCUMULATE)
        for number, ((lacking, shape), schedule, accumulate) in enumerate(combined):
            if not quick or number % 3 == 0:
                name = f"{lacking}, {schedule}, K={accumulate}"
                window = partial(_window, accumulate, shape)
                yield _case(kind, name, _tree, window, {"schedule": schedule})
        yield from _of_options(kind)
        yield from _of_architectures(kind, names, quick)


def _of_architectures(kind: str, names: Sequence[str] | None, quick: bool) -> Iterator[Case]:
    """Each in all schedules, of which it depends on the architecture how many micro-batches they run; quick:
    each third one, in one schedule."""
    known = importlib.import_module("architectures").ARCHITECTURES
    for number, name in enumerate(known if names is None else names):
        architecture = known[name]
        for index, schedule in enumerate(SCHEDULES):
            accumulate = ACCUMULATE[(number + index) % len(ACCUMULATE)]
            if not quick or number % len(SCHEDULES) ** 2 == index:
                window = partial(_window_of, architecture, accumulate)
                full_name = f"{name}, {schedule}, K={accumulate}"
                yield _case(kind, full_name, architecture.model, window, {"schedule": schedule})


def _window_of(architecture: Any, accumulate: int, rank: int) -> list[Any]:
    """Rank 0 begins with the first of three micro-batches, rank 1 with the last."""
    window: list[Any] = architecture.window(3)
    return (window[::-1] if rank else window)[:accumulate]


def _of_options(kind: str) -> Iterator[Case]:
    window = partial(_window, 2, LACKING["one has fewer"])
    for name, options in {**BOTH, **(ONLY_DDP if kind == "ddp" else {})}.items():
        build = partial(_tree, tied="tied" in name)
        yield _case(kind, name, build, window, options)
        if "skipping" in name:
            yield _case(kind, "skipped", build, partial(_broken, window), options)
    yield _case(kind, "gradients added to those that are there", _tree, window, {}, steps=False)
    if kind == "ddp":
        yield _case(kind, "tied heads", partial(_tree, tied=True), window, {})
        yield _case(kind, "a frozen head", _frozen, window, {})
        narrow = partial(_in_float32, window)
        yield _case(kind, "gradients in fp16", _tree_in_float32, narrow, {"comm_hook": "fp16"})


def _case(
    kind: str,
    name: str,
    build: Callable[[], Any],
    window: Callable[[int], list[Any]],
    options: Mapping[str, Any],
    steps: bool = True,
) -> Case:
    spread = mtaccum.parallel.shard if kind == "fsdp" else None
    return Case(kind, name, build, window, options, steps=steps, spread=spread)


def _tree(tied: bool = False) -> Any:
    return importlib.import_module("ranked").tree(tied)


def _tree_in_float32() -> Any:
    return _tree().float()


def _in_float32(window: Callable[[int], list[Any]], rank: int) -> list[Any]:
    return [{k: v.float() if v.is_floating_point() else v for k, v in b.items()} for b in window(rank)]


def _frozen() -> Any:
    model = _tree()
    model.task("cls").mode = "frozen"
    return model


def _window(accumulate: int, shape: tuple[tuple[int, tuple[str, ...]], ...], rank: int) -> list[Any]:
    batch = importlib.import_module("ranked").batch
    more, without = shape[rank]
    number = max(0, accumulate + more)
    return [batch(10 * rank + i, samples=3 - i % 2, without=without) for i in range(number)]


def _broken(window: Callable[[int], list[Any]], rank: int) -> list[Any]:
    """Rank 0 alone has an input that is not finite."""
    batches = window(rank)
    if rank == 0:
        batches[0]["image"][0, 0, 0, 0] = float("nan")
    return batches
