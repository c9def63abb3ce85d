"""Drawn trees, windows, missing labels, modes, schedules, recomputed segments, head groups and chunks
against the joint double reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    SCHEDULE_NAMES,
    assert_close_gradients,
    assert_equal_states,
    joint_reference,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mtaccum import Engine, MultiTaskModel, Neck, Task

WIDTH = 5
# The same examples in every run, and none that fails for the time that it takes on a busy machine.
untimed = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

# How much of a task's labels a micro-batch lacks; or it has no such entry, or None there.
MISSING: tuple[float | str, ...] = (0.0, 0.0, 0.0, 0.4, 0.4, 1.0, "absent", "none")

# What may be recomputed of a node: all of it, or modules in it.
TRUNK_SEGMENTS = ("", ".linear", ".norm")
NECK_SEGMENTS = ("", ".linear", ".drop")
HEAD_SEGMENTS = ("", ".mix", ".mix.norm", ".out")


@dataclass(frozen=True)
class Drawn:
    """What hypothesis chose. Necks and tasks: the indices of the nodes that each is on, where node 0 is the
    trunk, and node i + 1 the neck i; ``containers``, ``recompute`` (of a node, which of its segments) and
    ``ties`` (pairs of nodes) go by nodes, with the tasks behind the necks."""

    necks: list[list[int]]
    tasks: list[list[int]]
    modes: list[str]
    weights: list[float]
    sizes: list[int]
    missing: list[list[float | str]]
    norm: bool
    batchnorm: str
    dropout: float
    trunk: bool
    trunk_learns: bool
    containers: list[str]
    in_terms: list[bool]
    recompute: list[tuple[int, int]]
    ties: list[tuple[int, int]]
    seed: int


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    paths = [[0]]  # for each node the path from the trunk to it

    def sources() -> tuple[list[int], list[int]]:
        path = draw(st.sampled_from(paths))
        chosen = draw(st.lists(st.sampled_from(path), unique=True, max_size=2))
        return path, sorted({*chosen, path[-1]})

    necks = []
    for index in range(draw(st.integers(0, 3))):
        path, on = sources()
        necks.append(on)
        paths.append([*path, index + 1])
    tasks = [sources()[1] for _ in range(draw(st.sampled_from([2, 3, 4, 1])))]
    count, micro_batches = len(tasks), draw(st.integers(1, 5))
    nodes = st.integers(0, len(necks) + count)
    return Drawn(
        necks,
        tasks,
        [
            draw(st.sampled_from(["train", "train", "train", "frozen", "detached", "off"]))
            for _ in range(count)
        ],
        [draw(st.sampled_from([1.0, 0.3, 2.0, 1.0, 0.1, 0.0])) for _ in range(count)],
        [draw(st.sampled_from([2, 3, 4, 5, 3, 0])) for _ in range(micro_batches)],
        [[draw(st.sampled_from(MISSING)) for _ in range(micro_batches)] for _ in range(count)],
        draw(st.sampled_from([True, True, False])),
        draw(st.sampled_from(["keep", "keep", "freeze"])),
        draw(st.sampled_from([0.3, 0.0])),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.sampled_from([True, True, True, False])),
        [draw(st.sampled_from(sorted(CONTAINERS))) for _ in range(len(necks) + 1)],
        [draw(st.booleans()) for _ in range(count)],
        draw(
            st.lists(
                st.tuples(nodes, st.integers(0, 3)), min_size=draw(st.sampled_from([1, 0, 2])), max_size=3
            )
        ),
        draw(st.lists(st.tuples(nodes, nodes), max_size=2)),
        draw(st.integers(0, 10**6)),
    )


# --- features ---------------------------------------------------------------------------------------------


class Named(NamedTuple):
    x: Tensor
    n: int
    halves: Tensor


@dataclass
class Fields:
    x: Tensor
    halves: Tensor
    none: None = None


# How a node's two tensors, one of which is a view of the other, are put into its features, and taken out.
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dict": (lambda x, h: {"x": x, "n": 3, "halves": h}, lambda f: (f["x"], f["halves"])),
    "tuple": (lambda x, h: (x, None, h, x), lambda f: (f[3], f[2])),
    "list": (lambda x, h: [[x], h, "text"], lambda f: (f[0][0], f[1])),
    "named tuple": (lambda x, h: Named(x, 1, h), lambda f: (f.x, f.halves)),
    "dataclass": (lambda x, h: Fields(x, h), lambda f: (f.x, f.halves)),
    "nest": (
        lambda x, h: {"a": (Fields(x, h), 2), "b": [x, {"h": h}]},
        lambda f: (f["a"][0].x * f["a"][1] - f["b"][0], f["b"][1]["h"]),
    ),
    "tensor": (lambda x, h: x, lambda f: (f, f[:, : WIDTH // 2 + 1])),
}


class Mix(nn.Module):
    """Concatenates the features that it gets, each from its kind of container, and returns its own kind."""

    def __init__(self, case: Drawn, given: list[str], container: str) -> None:
        super().__init__()
        self.linear = nn.Linear(len(given) * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if case.norm else nn.Identity()
        self.drop = nn.Dropout(case.dropout)
        self.given, self.container = given, container

    def forward(self, features: Any) -> Any:
        sources = features if len(self.given) > 1 else (features,)
        tensors = []
        for source, kind in zip(sources, self.given, strict=True):
            x, halves = CONTAINERS[kind][1](source)
            tensors.append(x + halves.repeat(1, 2)[:, :WIDTH])
        x = self.drop(self.norm(self.linear(torch.cat(tensors, dim=1)).tanh()))
        return CONTAINERS[self.container][0](x, x[:, : WIDTH // 2 + 1])


class Head(nn.Module):
    def __init__(self, case: Drawn, given: list[str]) -> None:
        super().__init__()
        self.mix, self.out = Mix(case, given, "tensor"), nn.Linear(WIDTH, 1)

    def forward(self, features: Any) -> Tensor:
        return self.out(self.mix(features))[:, 0]


class Square(Task):
    """Mean squared error over the targets that aren't NaN; in named terms where asked for."""

    def __init__(self, head: nn.Module, target: str, in_terms: bool, **settings: Any) -> None:
        super().__init__(head, target, **settings)
        self.in_terms = in_terms

    def loss(self, prediction: Tensor, batch: Any) -> Any:
        target = batch[self.target]
        valid = ~target.isnan()
        errors = torch.where(valid, prediction, 0) - torch.where(valid, target, 0)
        loss = errors.square().sum() / valid.sum()
        return {"third": loss / 3, "rest": {"rest": loss * 2 / 3, "constant": 0.5}} if self.in_terms else loss

    def count(self, batch: Any) -> Tensor | int:
        target = batch.get(self.target)
        return 0 if target is None else (~target.isnan()).sum()


# --- models and windows -----------------------------------------------------------------------------------


def build(case: Drawn) -> MultiTaskModel:
    def given(on: list[int]) -> list[str]:
        return ["tensor" if node == 0 and not case.trunk else case.containers[node] for node in on]

    torch.manual_seed(case.seed)
    names = ["trunk", *(f"neck{i}" for i in range(len(case.necks)))]
    necks = {
        names[i + 1]: Neck(Mix(case, given(on), case.containers[i + 1]), on=tuple(names[n] for n in on))
        for i, on in enumerate(case.necks)
    }
    tasks = {
        f"task{i}": Square(
            Head(case, given(on)),
            f"y{i}",
            case.in_terms[i],
            weight=case.weights[i],
            on=tuple(names[n] for n in on),
            mode=case.modes[i],
        )
        for i, on in enumerate(case.tasks)
    }
    used = {names[0]}  # a neck that feeds no task is warned of
    pending = [n for on in case.tasks for n in on]
    while pending:
        node = pending.pop()
        if node and names[node] not in used:
            pending += case.necks[node - 1]
        used.add(names[node])
    necks = {name: neck for name, neck in necks.items() if name in used}
    trunk = Mix(case, ["tensor"], case.containers[0]) if case.trunk else None
    model = MultiTaskModel(trunk, tasks, inputs="x", necks=necks).double()
    linears = {
        name: module.mix.linear if isinstance(module, Head) else module.linear
        for name, module in model.own_modules().items()
    }
    order = [*names, *tasks]
    for one, other in case.ties:
        tied = [linears[order[node]] for node in (one, other) if order[node] in linears]
        if len(tied) == 2 and tied[0].weight.shape == tied[1].weight.shape:
            tied[1].weight = tied[0].weight
    if trunk is not None:
        trunk.requires_grad_(case.trunk_learns)
    return model


def recompute_of(case: Drawn, model: MultiTaskModel) -> list[str]:
    """Names of nodes and of modules in them, as far as the model has them."""
    order = ["trunk", *(f"neck{i}" for i in range(len(case.necks))), *model.tasks]
    names = []
    for node, segment in case.recompute:
        segments = (
            TRUNK_SEGMENTS if node == 0 else NECK_SEGMENTS if node <= len(case.necks) else HEAD_SEGMENTS
        )
        if order[node] in model.own_modules():
            names.append(order[node] + segments[segment % len(segments)])
    return names


def window_of(case: Drawn) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(case.seed)
    window = []
    for index, size in enumerate(case.sizes):
        batch: dict[str, Any] = {"x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)}
        for task, missing in enumerate(case.missing):
            target = torch.randn(size, generator=generator, dtype=torch.float64)
            share = missing[index]
            if share == "none":
                batch[f"y{task}"] = None
            elif not isinstance(share, str):
                absent = torch.rand(size, generator=generator) < share
                batch[f"y{task}"] = target.masked_fill(absent, torch.nan)
        window.append(batch)
    return window


@pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay")
@settings(untimed, max_examples=300)
@given(drawn(), st.sampled_from(sorted(SCHEDULE_NAMES)))
def test_a_window_does_what_the_joint_backward_does(case: Drawn, schedule: str) -> None:
    assert_as_joint(case, schedule)


@pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay")
@settings(untimed, max_examples=120)
@given(
    drawn(),
    st.sampled_from(["split", "split", "sequential"]),
    st.lists(st.sampled_from([1, 1, 2, 3, 0]), min_size=4, max_size=4),
)
def test_head_groups_and_chunks_do_what_the_joint_backward_does(
    case: Drawn, schedule: str, arranged: list[int]
) -> None:
    # a 1 is for a head group with the others of the same node, a larger number for so many chunks
    case = replace(case, dropout=0.0)  # in another order other masks are drawn
    paths, groups, chunks = build(case).paths, {}, {}
    for index in range(len(case.tasks)):
        name, choice = f"task{index}", arranged[index]
        if choice == 1:
            groups.setdefault(paths[name][:-1], []).append(name)
        elif choice and schedule == "split" and (case.batchnorm == "freeze" or not case.norm):
            chunks[name] = choice
    several = [group[::-1] for group in groups.values() if len(group) > 1]
    assert_as_joint(case, schedule, head_groups=several, chunks=chunks)


def assert_as_joint(case: Drawn, schedule: str, **options: Any) -> None:
    """Gradients, buffers, random state and losses are those of the joint reference."""
    window, model = window_of(case), build(case)
    frozen = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and case.batchnorm == "freeze"]
    start = torch.get_rng_state()
    for layer in frozen:
        layer.eval()
    reference = joint_reference(model, window)
    for layer in frozen:
        layer.train()
    after_reference = torch.get_rng_state()

    torch.set_rng_state(start)
    options |= {"batchnorm": case.batchnorm, "recompute": recompute_of(case, model)}
    engine = Engine(model, schedule=schedule, **options)
    result = engine.accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)
    assert torch.equal(torch.get_rng_state(), after_reference)
    assert result.losses.keys() == reference.losses.keys()
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(reference.losses[name].item(), rel=1e-12)
