"""Peaks of live tensor bytes: one head at a time. Exact counts, so they don't depend on the machine."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SCHEDULE_NAMES, Squared, assert_close_gradients, joint_reference
from torch import Tensor, nn

from mtaccum import (
    Classification,
    Engine,
    MultiTaskModel,
    Segmentation,
    sequential_backward,
    split_backward,
    split_batch,
)
from mtaccum.memory import LiveBytes, measure_peak


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """Nothing here may depend on when the collector comes by, and a step must not need it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def benchmark_models() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("benchmark_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def activation_peak(step: Callable[[], Any], *modules: nn.Module) -> int:
    """Bytes by which the peak of a step exceeds what was there; the gradients exist already."""
    # once under the tracker: the first time, PyTorch imports parts of itself, and leaves garbage
    measure_peak(step, existing=modules)
    gc.collect()
    return measure_peak(step, existing=modules).activation_bytes


# --- many equal heads, small ------------------------------------------------------------------------------

# The benchmark's model in small: the shares of trunk, features and logits are those of width 128 at 128x128.
WIDTH, CLASSES, SIZE, BATCH = 32, 3, 64, 4


def dense_peak(schedule: str, heads: int) -> int:
    """Activation peak of one backward of all heads of the benchmark's dense model."""
    torch.manual_seed(0)
    trunk, modules = benchmark_models().dense_model(heads, width=WIDTH, classes=CLASSES)
    image = torch.rand(BATCH, 3, SIZE, SIZE)
    labels = torch.randint(0, CLASSES, (BATCH, SIZE, SIZE))

    def loss(head: nn.Module, features: Tensor) -> Tensor:
        return F.cross_entropy(head(features), labels)

    def step() -> None:
        if schedule == "split":
            split_backward(trunk(image), {str(i): lambda f, m=m: loss(m, f) for i, m in enumerate(modules)})
        elif schedule == "recompute":
            losses = {str(i): lambda f, m=m: loss(m, f) for i, m in enumerate(modules)}
            split_backward(lambda: trunk(image), losses, recompute=True)
        elif schedule == "sequential":
            sequential_backward({str(i): lambda m=m: loss(m, trunk(image)) for i, m in enumerate(modules)})
        else:
            features = trunk(image)
            torch.stack([loss(module, features) for module in modules]).sum().backward()

    return activation_peak(step, trunk, *modules)


def few_bytes(heads: int) -> int:
    """The losses that are returned: one 0-d float for each."""
    return 4 * heads


def test_16_heads_take_sequentially_what_one_takes() -> None:
    assert dense_peak("sequential", 16) <= 1.00 * dense_peak("sequential", 1) + few_bytes(16)


def test_16_heads_take_in_split_what_one_takes_and_a_gradient_at_the_cut() -> None:
    one, sixteen = dense_peak("split", 1), dense_peak("split", 16)
    assert sixteen <= 1.03 * one
    gradient_at_the_cut = BATCH * WIDTH * (SIZE // 4) ** 2 * 4
    assert sixteen - one <= gradient_at_the_cut + few_bytes(16)


def test_8_heads_take_in_split_half_of_what_they_take_summed() -> None:
    assert dense_peak("split", 8) <= 0.50 * dense_peak("summed", 8)


def test_a_recomputed_trunk_takes_less_still() -> None:
    one, eight = dense_peak("recompute", 1), dense_peak("recompute", 8)
    assert eight < 0.9 * dense_peak("split", 8)
    assert eight - one <= BATCH * WIDTH * (SIZE // 4) ** 2 * 4 + few_bytes(8)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_the_engine_takes_no_more_than_the_functions(schedule: str) -> None:
    torch.manual_seed(0)
    trunk, heads = benchmark_models().dense_model(4, width=WIDTH, classes=CLASSES)
    tasks = {f"t{i}": Segmentation(CLASSES, head=head, target="y") for i, head in enumerate(heads)}
    model = MultiTaskModel(trunk, tasks, inputs="x")
    batch = {"x": torch.rand(BATCH, 3, SIZE, SIZE), "y": torch.randint(0, CLASSES, (BATCH, SIZE, SIZE))}
    parameter_bytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    engine = Engine(model, schedule=schedule)

    def step() -> None:
        model.zero_grad()
        engine.accumulate([batch])

    measure_peak(step)
    model.zero_grad()
    gc.collect()
    peak = measure_peak(step, existing=[model, *batch.values()]).activation_bytes
    # gradients come into being within the step, and counting labels takes a byte for each
    assert peak <= dense_peak(schedule, 4) + parameter_bytes + 1024


def test_before_a_trunk_is_recomputed_only_the_gradient_at_the_cut_is_left() -> None:
    torch.manual_seed(0)
    x, layer, head = torch.rand(512, 8), nn.Linear(8, 32), nn.Linear(32, 2)
    at_the_start: list[int] = []

    def step(live: LiveBytes | None = None) -> None:
        def trunk() -> Tensor:
            if live is not None:
                at_the_start.append(live.current_bytes)
            return layer(x)

        split_backward(
            trunk, {"a": lambda f: head(f).sum(), "b": lambda f: head(f).pow(2).sum()}, recompute=True
        )

    step()
    with LiveBytes([layer, head]) as live:
        step(live)
    first, again = at_the_start
    gradient_at_the_cut, random_state = 512 * 32 * 4, len(torch.get_rng_state())
    assert again - first <= gradient_at_the_cut + 4 * random_state + few_bytes(2)


def test_two_models_take_what_the_larger_one_takes_alone() -> None:
    torch.manual_seed(0)
    x = torch.rand(32, 64)
    large = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    small = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)))
    losses = {"large": lambda: large(x).pow(2).mean(), "small": lambda: small(x).pow(2).mean()}

    alone = activation_peak(lambda: sequential_backward({"large": losses["large"]}), large, small)
    joint = activation_peak(lambda: (losses["large"]() + losses["small"]()).backward(), large, small)

    for order in (("large", "small"), ("small", "large")):
        both = activation_peak(
            lambda order=order: sequential_backward({n: losses[n] for n in order}), large, small
        )
        assert alone <= both <= alone + few_bytes(2)
    assert joint > 1.3 * alone, "the models were to matter"

    model = MultiTaskModel(None, {"large": Squared(large), "small": Squared(small)}, inputs="x")
    for schedule in ("split", "sequential"):
        engine = Engine(model, schedule=schedule)

        def step(engine: Engine = engine) -> None:
            model.zero_grad()
            engine.accumulate([{"x": x}])

        measure_peak(step)
        model.zero_grad()
        gc.collect()
        peak = measure_peak(step, existing=[model]).activation_bytes
        gradients = sum(parameter.numel() for parameter in model.parameters()) * 4
        assert peak <= alone + gradients + 64


# --- heads of different sizes -----------------------------------------------------------------------------


def test_heads_of_width_8_64_and_512_take_what_the_largest_takes_g3() -> None:
    def peak(*widths: int, joint: bool = False) -> int:
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        heads = [nn.Sequential(nn.Linear(16, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh()) for w in widths]
        x = torch.rand(256, 16)

        def step() -> None:
            features = trunk(x)
            if joint:
                torch.stack([head(features).pow(2).mean() for head in heads]).sum().backward()
            else:
                split_backward(
                    features, {str(i): lambda f, h=h: h(f).pow(2).mean() for i, h in enumerate(heads)}
                )

        return activation_peak(step, trunk, *heads)

    gradient_at_the_cut = 256 * 16 * 4
    largest = peak(512)
    for widths in ((8, 64, 512), (512, 64, 8), (64, 512, 8)):
        assert largest <= peak(*widths) <= largest + gradient_at_the_cut + few_bytes(3)
    assert peak(512, 512, 512) <= largest + gradient_at_the_cut + few_bytes(3)
    assert peak(512, 512, 512, joint=True) > 1.5 * largest


# --- many micro-batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_exact_counts_and_a_peak_that_does_not_grow_with_k_g4(schedule: str) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    model = MultiTaskModel(
        trunk,
        {
            "a": Classification(
                5, head=nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)), target="y"
            ),
            "b": Squared(nn.Sequential(nn.Linear(64, 64), nn.GELU())),
        },
        inputs="x",
    )
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    gradients = sum(parameter.numel() for parameter in model.parameters()) * 4

    def peak(micro_batches: int) -> int:
        whole = {"x": torch.rand(64 * micro_batches, 64), "y": torch.randint(0, 5, (64 * micro_batches,))}
        whole["y"][:7] = -100  # so that the counts differ
        window = split_batch(whole, micro_batches)
        return measure_peak(lambda: engine.step(window), existing=[model]).activation_bytes

    peak(1)  # the first time, PyTorch imports parts of itself, and leaves garbage
    gc.collect()
    one, two, eight = peak(1), peak(2), peak(8)
    few = 8 * 4 * 8  # the counts, and the sums of the losses
    assert eight <= two + few
    assert eight <= one + gradients + few
    activations = one - gradients
    assert activations > gradients, "the activations were to matter"

    # and the gradient is that of the whole batch, of which micro-batches hold unequally many labels
    model.zero_grad()
    whole = {"x": torch.rand(32, 64), "y": torch.randint(0, 5, (32,))}
    whole["y"][:7] = -100
    reference = joint_reference(model, [whole])
    engine.accumulate(split_batch(whole, 8))
    assert_close_gradients(model, reference, 1e-5)


def test_a_step_returns_to_the_bytes_it_started_from_g5() -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), {"a": Squared(nn.Linear(8, 2))}, inputs="x"
    )
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), max_grad_norm=1.0)
    window = [{"x": torch.rand(5, 8)}, {"x": torch.rand(3, 8)}]
    measure_peak(lambda: engine.step(window))
    gc.collect()
    with LiveBytes([model]) as live:
        start = live.current_bytes
        for _ in range(5):
            result = engine.step(window)
            assert live.current_bytes - start <= 64, "only the result may stay"
        del result
        assert live.current_bytes == start
