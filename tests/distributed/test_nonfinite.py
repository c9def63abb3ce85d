"""Values that aren't finite on one rank: all ranks leave the step out, or stop, and say where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SCHEDULE_NAMES, Squared, assert_equal_states, plain_batch, plain_model
from pool import Pool
from ranked import (
    KINDS,
    Windows,
    assert_equal_steps,
    assert_same_result,
    batch,
    engine_of,
    expected,
    full_parameters,
    made,
    raised,
    step,
    tree,
)
from torch import Tensor, nn

from mtaccum import Engine, MultiTaskModel
from mtaccum.parallel import current_ranks

kinds = pytest.mark.parametrize("kind", KINDS)
schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)


def infinite(made: dict[str, Any], entry: str) -> dict[str, Any]:
    values = made[entry].clone()
    values.view(-1)[0] = float("inf")
    return {**made, entry: values}


class Skipped:
    """What a rank has after a step that was left out, and after a good one."""

    def __init__(self, engine: Engine, bad: list[Any]) -> None:
        model = engine.model
        self.before, buffers = full_parameters(model), copies(model)
        self.result = engine.step(bad)
        self.after = full_parameters(model)
        self.buffers_kept = all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
        self.counted = counted(engine)
        self.no_gradient = all(parameter.grad is None for parameter in model.parameters())


def counted(engine: Engine) -> tuple[int, int]:
    """Steps left out, in all and in a row."""
    return engine.skipped_steps.total, engine.skipped_steps.in_a_row


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def skip(build: Any, kind: str, windows: Windows, good: Windows, options: dict[str, Any]) -> Any:
    model, rank = made(build, kind), current_ranks().rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(kind, model, optimizer, on_nonfinite="skip", **options)
    skipped = Skipped(engine, windows[rank])
    result = engine.step(good[rank])
    return vars(skipped), result, full_parameters(model), counted(engine)


@schedules
@kinds
def test_a_loss_on_one_rank_skips_the_step_on_all(pool: Pool, kind: str, schedule: str) -> None:
    windows = [[batch(1)], [batch(2), infinite(batch(3), "five")], []]
    good = [[batch(4)], [], [batch(5), batch(6)]]

    found = pool.run(skip, tree, kind, windows, good, {"schedule": schedule}, ranks=3)

    one = expected(tree, good, {"schedule": schedule})
    for skipped, result, parameters, skips in found:
        assert skipped["result"].nonfinite.startswith(
            "rank 1: the loss of task 'bare' is inf in micro-batch 1 of "
        )
        assert_same_result(skipped["result"], found[0][0]["result"])
        assert not skipped["result"].stepped
        assert_equal_states(skipped["after"], skipped["before"])
        assert skipped["buffers_kept"]
        assert skipped["no_gradient"]
        assert (skipped["counted"], skips) == ((1, 1), (1, 0))
        assert result.stepped  # and from a step left out nothing is left over
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, one.parameters[name], rtol=1e-10, atol=1e-10)


def stop(build: Any, kind: str, windows: Windows) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    model = made(build, kind)
    before = full_parameters(model)
    engine = engine_of(kind, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return raised(engine.step, windows[current_ranks().rank]), before, full_parameters(model)


@kinds
def test_raise_stops_all_ranks_with_one_error(pool: Pool, kind: str) -> None:
    windows = [[batch(1)], [batch(2)], [infinite(batch(3, without=["cls"]), "other")]]

    found = pool.run(stop, tree, kind, windows, ranks=3)

    assert len({error for error, _, _ in found}) == 1
    assert found[0][0].startswith("NonfiniteError: step 1: rank 2: the loss of task 'terms' is ")
    for _, before, after in found:
        assert_equal_states(before, after)


class Rooted(nn.Module):
    """Square roots, whose gradient is infinite at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).square().sqrt()


def rooted() -> MultiTaskModel:
    """Where the inputs are 0, so are the features, and the gradient of ``root`` is NaN."""
    torch.manual_seed(0)
    tasks = {
        "plain": Squared(nn.Linear(8, 1)),
        "root": Squared(Rooted(), "y"),
        "last": Squared(nn.Linear(8, 2)),
    }
    return MultiTaskModel(nn.Linear(3, 8, bias=False), tasks, inputs="x").double()


def vectors(*factors: float, labelled: bool = True) -> list[Any]:
    x = torch.ones(2, 3, dtype=torch.float64)
    return [{"x": x * factor, "y": x if labelled else None} for factor in factors]


@schedules
@kinds
def test_the_task_of_a_gradient_is_named(pool: Pool, kind: str, schedule: str) -> None:
    windows = [vectors(1.0, 2.0, labelled=False), vectors(1.0, 0.0, 2.0), vectors(1.0)]

    found = pool.run(skip, rooted, kind, windows, windows, {"schedule": schedule}, ranks=3)

    # sharded parameters show the gradient of all ranks
    place = "" if kind == "fsdp" else "rank 1: "
    for skipped, *_ in found:
        finding = skipped["result"].nonfinite
        assert finding.startswith(f"{place}the gradient of task 'root' is not finite in micro-batch 1 of 3")


def spoil(kind: str, windows: Windows) -> Any:
    """A hook that leaves NaN on the last rank only."""
    model, ranks = made(plain_model, kind), current_ranks()

    def on_gradients(model: MultiTaskModel) -> None:
        if ranks.rank == ranks.world_size - 1:
            next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(kind, model, optimizer, on_gradients=on_gradients, on_nonfinite="skip")
    return vars(Skipped(engine, windows[ranks.rank]))


@kinds
def test_a_hook_that_spoils_gradients_on_one_rank_skips_on_all(pool: Pool, kind: str) -> None:
    for skipped in pool.run(spoil, kind, [[plain_batch(2)], [plain_batch(3)]]):
        assert skipped["result"].nonfinite == "on_gradients left gradients that are not finite"
        assert_equal_states(skipped["after"], skipped["before"])


def huge(kind: str, windows: Windows) -> tuple[Any, str]:
    """Gradients that are finite, and whose norm is not."""
    model = made(plain_model, kind)

    def enormous(loss: Tensor) -> None:
        (loss * 1e300).backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(kind, model, optimizer, backward=enormous, on_nonfinite="skip", max_skipped=2)
    result = engine.step(windows[current_ranks().rank])
    return result, raised(engine.step, windows[current_ranks().rank])


@kinds
def test_what_is_said_and_counted_is_the_same_on_all_ranks(pool: Pool, kind: str) -> None:
    found = pool.run(huge, kind, [[plain_batch(2)], []])

    for result, error in found:
        assert_same_result(result, found[0][0])
        assert "so large that their norm is not" in result.nonfinite
        assert error.startswith("NonfiniteError: step 1: ")
        assert error.endswith("This is the 2. skipped step in a row.")


# --- losses that are scaled --------------------------------------------------------------------------------


# a gradient goes through some ten roundings, and its factor is another one on several ranks
ROUNDINGS = {"bf16": 10 * 2**-9, "fp16": 10 * 2**-12}


def half() -> MultiTaskModel:
    return plain_model().float()


def single(*samples: int) -> list[Any]:
    batches = [plain_batch(number, seed=number) for number in samples]
    return [{k: v.float() if v.is_floating_point() else v for k, v in made.items()} for made in batches]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("ddp", "bf16"), ("ddp", "fp16"), ("fsdp", "bf16"), ("plain", "bf16"), ("plain", "fp16")],
)
def test_low_precision_is_that_of_one_process(pool: Pool, kind: str, precision: str) -> None:
    windows, options = [single(3, 2), [], single(5)], {"precision": precision}

    found = pool.run(step, half, kind, windows, options, ranks=3)

    assert_equal_steps(found, expected(half, windows, options), ROUNDINGS[precision])


def overflow(windows: Windows) -> list[Any]:
    model = half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, precision="fp16", scaler=scaler)
    seen = []
    for _ in range(30):
        result = engine.step(windows[current_ranks().rank])
        seen.append((result.nonfinite, scaler.get_scale()))
        if result.stepped:
            break
    return [seen, full_parameters(model)]


def test_the_loss_scale_is_the_same_on_all_ranks(pool: Pool) -> None:
    (seen, parameters), *others = pool.run(overflow, [single(3), []], ranks=2)

    assert "overflowed at a loss scale of 1.07374e+09" in seen[0][0]
    assert seen[0][1] == 2.0**29
    assert seen[-1][0] is None
    for theirs, also in others:
        assert theirs == seen
        assert_equal_states(parameters, also)
