"""Cases for each option of an engine, for the modes of tasks, and for the functions that need no engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum import sequential_backward, split_backward
from revisions.observe import Case

__all__ = ["awkward_batches", "awkward_model", "option_cases", "plain_batches", "plain_model"]

Options = Mapping[str, Any]

# On the awkward tree, which normalises and draws random numbers, in float64.
AWKWARD: dict[str, Options] = {
    "head groups": {"head_groups": [["cls", "left", "right"]]},
    "head groups, sequential": {"head_groups": [["depth", "cls"]], "schedule": "sequential"},
    "clipped": {"max_grad_norm": 0.1},
    "clipped, summed": {"max_grad_norm": 0.1, "schedule": "summed"},
    "BatchNorm frozen": {"batchnorm": "freeze"},
    "BatchNorm frozen, sequential": {"batchnorm": "freeze", "schedule": "sequential"},
    "BatchNorm frozen, recomputed": {"batchnorm": "freeze", "recompute": ["trunk", "fpn"]},
    "chunks, BatchNorm frozen": {"batchnorm": "freeze", "chunks": {"depth": 2, "seg": 3}},
    "patterns": {"recompute": ["trunk.*", "deep.layer"]},
    "skipping": {"on_nonfinite": "skip"},
    "compiled": {"compile": {"backend": "eager"}},
}
# On a plain model, in float32 where precision says so.
PLAIN: dict[str, Options] = {
    "chunks": {"chunks": {"cls": 2, "other": 3}},
    "chunks and recompute": {"chunks": {"other": 2}, "recompute": ["trunk", "other[0:2]"]},
    "head groups of all": {"head_groups": [["cls", "value", "other"]]},
    "bf16": {"precision": "bf16"},
    "bf16, sequential": {"precision": "bf16", "schedule": "sequential"},
    "bf16, summed": {"precision": "bf16", "schedule": "summed"},
    "bf16, recomputed and clipped": {"precision": "bf16", "recompute": ["trunk"], "max_grad_norm": 0.5},
}


def option_cases(quick: bool) -> Iterator[Case]:
    """All of them, each with one and with three micro-batches; quick: in turn with one or three."""
    for number, cases in enumerate(zip(_of_engines(1), _of_engines(3), strict=True)):
        yield from cases if not quick else cases[number % 2 : number % 2 + 1]
    yield from _of_functions()


def _of_engines(accumulate: int) -> Iterator[Case]:
    yield from _of_options(accumulate)
    yield from _of_labels(accumulate)
    yield from _of_modes(accumulate)


def awkward_model() -> Any:
    """The awkward tree of the tests."""
    return importlib.import_module("helpers").awkward_model()


def plain_model() -> Any:
    return importlib.import_module("helpers").plain_model()


def plain_float32() -> Any:
    return plain_model().float()


def awkward_batches(samples: tuple[int, ...], _rank: int = 0) -> list[Any]:
    """Micro-batches of so many samples for it."""
    make = importlib.import_module("helpers").awkward_batch
    return [make(number, seed) for seed, number in enumerate(samples)]


def plain_batches(
    samples: tuple[int, ...], _rank: int = 0, *, missing: float = 0.5, half: bool = False
) -> list[Any]:
    make = importlib.import_module("helpers").plain_batch
    window = [make(number, seed, missing=missing) for seed, number in enumerate(samples)]
    narrow = {torch.float64: torch.float32}
    return [{k: v.to(narrow.get(v.dtype, v.dtype)) if half else v for k, v in b.items()} for b in window]


def _first_of(window: Callable[[int], list[Any]]) -> Any:
    return window(0)[0]


AWKWARD_BATCH = partial(_first_of, partial(awkward_batches, (6,)))
PLAIN_BATCHES = {half: partial(_first_of, partial(plain_batches, (6,), half=half)) for half in (False, True)}


def _sizes(accumulate: int) -> tuple[int, ...]:
    return (4, 3, 5)[:accumulate]


def _of_options(accumulate: int) -> Iterator[Case]:
    for name, options in AWKWARD.items():
        case = partial(Case, "options", f"{name}, K={accumulate}", awkward_model, options=options)
        window = partial(awkward_batches, _sizes(accumulate))
        yield case(window, batch=None if "compile" in options else AWKWARD_BATCH, accumulate=accumulate)
    for name, options in PLAIN.items():
        half = "precision" in options
        build = plain_float32 if half else plain_model
        case = partial(Case, "options", f"{name}, K={accumulate}", build, options=options)
        window = partial(plain_batches, _sizes(accumulate), half=half)
        yield case(window, batch=PLAIN_BATCHES[half], accumulate=accumulate)
    for schedule in ("summed", "sequential", "split"):
        name = f"gradients added to those that are there, {schedule}, K={accumulate}"
        window = partial(awkward_batches, _sizes(accumulate))
        yield Case("options", name, awkward_model, window, {"schedule": schedule}, steps=False)


def _without(names: tuple[str, ...], window: Callable[[int], list[Any]], _rank: int = 0) -> list[Any]:
    """A window whose first micro-batch lacks some entries, of which one is None elsewhere."""
    batches = window(0)
    for batch in batches:
        batch[names[0]] = None
    batches[0] = {key: value for key, value in batches[0].items() if key not in names}
    return batches


def _broken(key: str, window: Callable[[int], list[Any]], _rank: int = 0) -> list[Any]:
    """A window whose last micro-batch makes losses that are not finite."""
    batches = window(0)
    batches[-1][key] = torch.full_like(batches[-1][key], float("inf"))
    return batches


def _of_labels(accumulate: int) -> Iterator[Case]:
    """Labels that are missing, and values that aren't finite."""
    plain = partial(plain_batches, _sizes(accumulate))
    for schedule in ("summed", "sequential", "split"):
        how = {"schedule": schedule}
        end = f"{schedule}, K={accumulate}"
        yield Case("options", f"most labels missing, {end}", plain_model, partial(plain, missing=9.0), how)
        yield Case(
            "options", f"entries missing, {end}", plain_model, partial(_without, ("cls", "value"), plain), how
        )
        infinite = partial(_broken, "x", plain)
        yield Case("options", f"skipped, {end}", plain_model, infinite, {**how, "on_nonfinite": "skip"})
        yield Case("options", f"not finite, {end}", plain_model, infinite, how)
        yield Case("options", f"counted before, {end}", plain_model, plain, how, counted=True)


def _in_mode(mode: str, build: Callable[[], Any]) -> Any:
    model = build()
    if mode == "trunk frozen":
        model.trunk.requires_grad_(False)
    elif mode == "weight 0":
        model.task("cls").weight = 0.0
    else:
        model.task("cls").mode = mode
    return model


def _of_modes(accumulate: int) -> Iterator[Case]:
    for mode in ("frozen", "detached", "off", "trunk frozen", "weight 0"):
        for schedule in ("summed", "sequential", "split"):
            name = f"{mode}, {schedule}, K={accumulate}"
            window = partial(awkward_batches, _sizes(accumulate))
            build = partial(_in_mode, mode, awkward_model)
            yield Case("options", name, build, window, {"schedule": schedule})


# --- functions that need no engine ---


class Net(nn.Module):
    """A trunk that normalises and drops, and two heads; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.cls, self.value = nn.Linear(8, 4), nn.Linear(8, 2)
        self.double()


def _losses(net: Net, batch: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    known = batch["value"].nan_to_num()
    return {
        "cls": lambda f: F.cross_entropy(net.cls(f), batch["cls"]),
        "value": lambda f: F.mse_loss(net.value(f), known),
    }


def _split(recompute: bool, late: bool, net: Net, window: list[Any]) -> Mapping[str, Tensor]:
    batch = window[0]
    given = (lambda: net.trunk(batch["x"])) if late else net.trunk(batch["x"])
    return split_backward(given, _losses(net, batch), weights={"value": 0.5}, recompute=recompute)


def _sequential(net: Net, window: list[Any]) -> Mapping[str, Tensor]:
    batch = window[0]
    losses = _losses(net, batch)
    return sequential_backward(
        {name: partial(lambda loss: loss(net.trunk(batch["x"])), loss) for name, loss in losses.items()}
    )


def _of_functions() -> Iterator[Case]:
    window = partial(plain_batches, (5,))
    calls: dict[str, Callable[[Any, list[Any]], Mapping[str, Any]]] = {
        "split_backward": partial(_split, False, False),
        "split_backward of a function": partial(_split, False, True),
        "split_backward, recomputed": partial(_split, True, True),
        "sequential_backward": _sequential,
    }
    for name, call in calls.items():
        yield Case("functions", name, Net, window, call=call)
