"""Drawn trees, windows, missing labels, modes and schedules against the joint double reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from mtaccum import Engine, MultiTaskModel, Neck, Task

WIDTH = 5


@dataclass(frozen=True)
class Drawn:
    """What hypothesis chose. Necks and tasks: the indices of the nodes that each is on, where node 0 is the
    trunk, and node i + 1 the neck i."""

    necks: list[list[int]]
    tasks: list[list[int]]
    modes: list[str]
    weights: list[float]
    sizes: list[int]
    missing: list[list[float]]
    norm: bool
    trunk: bool
    trunk_learns: bool
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
    tasks = [sources()[1] for _ in range(draw(st.integers(1, 4)))]
    count, micro_batches = len(tasks), draw(st.integers(1, 5))
    return Drawn(
        necks,
        tasks,
        [draw(st.sampled_from(["train", "train", "frozen", "detached", "off"])) for _ in range(count)],
        [draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])) for _ in range(count)],
        [draw(st.integers(2, 5)) for _ in range(micro_batches)],
        [[draw(st.sampled_from([0.0, 0.4, 1.0])) for _ in range(micro_batches)] for _ in range(count)],
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 10**6)),
    )


class Mix(nn.Module):
    """Concatenates the features it gets and returns a dict with a tensor, an integer and a view."""

    def __init__(self, inputs: int, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, features: Any) -> dict[str, Any]:
        parts = features if isinstance(features, tuple) else (features,)
        tensors = [
            part["x"] + part["halves"].repeat(1, 2)[:, :WIDTH] if isinstance(part, dict) else part
            for part in parts
        ]
        x = self.norm(self.linear(torch.cat(tensors, dim=1)).tanh())
        return {"x": x, "n": 3, "halves": x[:, : WIDTH // 2 + 1]}


class Head(nn.Module):
    def __init__(self, inputs: int, norm: bool) -> None:
        super().__init__()
        self.mix, self.out = Mix(inputs, norm), nn.Linear(WIDTH, 1)

    def forward(self, features: Any) -> Tensor:
        return self.out(self.mix(features)["x"])[:, 0]


class Square(Task):
    """Mean squared error over the targets that aren't NaN."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        target = batch[self.target]
        valid = ~target.isnan()
        errors = torch.where(valid, prediction, 0) - torch.where(valid, target, 0)
        return errors.square().sum() / valid.sum()

    def count(self, batch: Any) -> Tensor:
        return (~batch[self.target].isnan()).sum()


def build(case: Drawn) -> MultiTaskModel:
    torch.manual_seed(case.seed)
    names = ["trunk", *(f"neck{i}" for i in range(len(case.necks)))]
    inputs = [len(on) for on in case.necks]
    necks = {
        names[i + 1]: Neck(Mix(inputs[i], case.norm), on=tuple(names[n] for n in on))
        for i, on in enumerate(case.necks)
    }
    tasks = {
        f"task{i}": Square(
            Head(len(on), case.norm),
            f"y{i}",
            weight=case.weights[i],
            on=tuple(names[n] for n in on),
            mode=case.modes[i],
        )
        for i, on in enumerate(case.tasks)
    }
    used = {names[0]}  # a neck that feeds no task is refused
    pending = [n for on in case.tasks for n in on]
    while pending:
        node = pending.pop()
        if node and names[node] not in used:
            pending += case.necks[node - 1]
        used.add(names[node])
    necks = {name: neck for name, neck in necks.items() if name in used}
    trunk = Mix(1, case.norm) if case.trunk else None
    if trunk is not None:
        trunk.requires_grad_(case.trunk_learns)
    return MultiTaskModel(trunk, tasks, inputs="x", necks=necks).double()


def window_of(case: Drawn) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(case.seed)
    window = []
    for index, size in enumerate(case.sizes):
        batch = {"x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)}
        for task, missing in enumerate(case.missing):
            target = torch.randn(size, generator=generator, dtype=torch.float64)
            absent = torch.rand(size, generator=generator) < missing[index]
            batch[f"y{task}"] = target.masked_fill(absent, torch.nan)
        window.append(batch)
    return window


def joint_gradients(model: MultiTaskModel, window: list[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """One forward of everything, one backward: the contract, written down without the engine."""
    tasks = {n: t for n, t in model.tasks_by_name().items() if t.mode != "off" and t.weight > 0}
    totals = {name: sum(int(task.count(batch)) for batch in window) for name, task in tasks.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for batch in window:
        features: dict[str, Any] = {"inputs": batch["x"]}

        def given(name: str, features: dict[str, Any] = features) -> Any:
            for source in model.sources(name):
                if source not in features:
                    features[source] = model.node(source)(given(source))
            parts = tuple(features[source] for source in model.sources(name))
            return parts[0] if len(parts) == 1 else parts

        for name, task in tasks.items():
            count = int(task.count(batch))
            if count == 0:
                continue
            parts = given(name)
            if task.mode == "detached":
                parts = _detached(parts)
            weights = {k: v.detach() for k, v in task.named_parameters()} if task.mode == "frozen" else {}
            prediction = functional_call(task, weights, (parts, batch))
            loss = loss + task.weight * task.loss(prediction, batch) * count / totals[name]
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def _detached(parts: Any) -> Any:
    if isinstance(parts, tuple):
        return tuple(map(_detached, parts))
    if isinstance(parts, dict):
        return {key: _detached(value) for key, value in parts.items()}
    return parts.detach() if isinstance(parts, Tensor) else parts


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn(), st.sampled_from(["summed", "sequential", "split"]))
def test_gradients_are_those_of_the_joint_backward(case: Drawn, schedule: str) -> None:
    window = window_of(case)
    expected = joint_gradients(build(case), window)
    model = build(case)

    Engine(model, schedule=schedule).accumulate(window)

    nodes: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        if parameter.grad is not None:
            nodes.setdefault(".".join(name.split(".")[:2]), []).append(name)
    found = dict(model.named_parameters())
    for names in nodes.values():
        norm = torch.stack([expected[name].norm() for name in names]).norm()  # type: ignore[union-attr]
        for name in names:
            difference = found[name].grad - expected[name]  # type: ignore[operator]
            assert difference.norm() <= 1e-12 * norm + 1e-300, name


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn())
def test_buffers_are_those_of_one_pass_in_every_schedule(case: Drawn) -> None:
    window = window_of(case)
    states = []
    for schedule in ("summed", "sequential", "split"):
        model = build(case)
        Engine(model, schedule=schedule).accumulate(window)
        states.append(dict(model.named_buffers()))
    for name, value in states[0].items():
        for other in states[1:]:
            assert torch.equal(value, other[name]), name
