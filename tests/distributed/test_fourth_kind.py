"""A kind of ranks of one's own, handed to an engine; the contract that it keeps is in ``test_gradients``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import assert_equal_states, joint_reference, plain_batch, plain_model
from plain_ranks import PlainAllReduce
from pool import Pool
from ranked import UNSHARDED, assert_close, assert_same_result, engine_of, made
from torch import Tensor

from mtaccum import Engine
from mtaccum.parallel import KINDS, Ranks, current_ranks

WINDOWS = [[plain_batch(3), plain_batch(2, seed=2)], [{**plain_batch(4, seed=3), "value": None}], []]


def taken() -> tuple[bool, str, int]:
    ranks = PlainAllReduce()
    engine = Engine(plain_model(), parallel=ranks)
    return engine.ranks is ranks, engine.ranks.kind, engine.ranks.world_size


def test_an_engine_takes_it_as_it_is(pool: Pool) -> None:
    assert "plain" not in KINDS
    assert pool.run(taken, ranks=3) == [(True, "plain", 3)] * 3


def scaled(kind: str) -> tuple[float, dict[str, float], dict[str, Tensor | None]]:
    """Sum of the losses as they went backward on this rank, the step's mean losses, and its gradients."""
    seen: list[float] = []
    gradients: dict[str, Tensor | None] = {}

    def backward(loss: Tensor) -> None:
        seen.append(loss.item())
        loss.backward()

    def look(model: Any) -> None:
        gradients.update((n, None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters())

    model = made(plain_model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(kind, model, optimizer, backward=backward, on_gradients=look)
    result = engine.step(WINDOWS[current_ranks().rank])
    return sum(seen), {name: loss.item() for name, loss in result.losses.items()}, gradients


@pytest.mark.parametrize("kind", UNSHARDED)
def test_losses_are_scaled_for_a_mean_or_for_a_sum(pool: Pool, kind: str) -> None:
    found = pool.run(scaled, kind, ranks=3)

    model = plain_model()
    reference = joint_reference(model, [batch for window in WINDOWS for batch in window])
    joint = sum(model.task(name).weight * loss.item() for name, loss in reference.losses.items())
    factor = {"ddp": 3, "plain": 1}[kind]
    assert sum(loss for loss, *_ in found) == pytest.approx(factor * joint, rel=1e-12)
    for _, losses, gradients in found:
        assert losses == pytest.approx({n: loss.item() for n, loss in reference.losses.items()}, rel=1e-12)
        for name, gradient in reference.gradients.items():
            assert_close(name, gradients[name], gradient, 1e-12)


def test_in_a_single_process_it_changes_nothing() -> None:
    model = plain_model()
    other = copy.deepcopy(model)
    results = [
        Engine(m, torch.optim.SGD(m.parameters(), lr=0.1), max_grad_norm=0.5, parallel=parallel).step(
            [plain_batch(3), {**plain_batch(4), "value": None}]
        )
        for m, parallel in ((model, PlainAllReduce()), (other, None))
    ]
    assert_same_result(*results)
    assert_equal_states(dict(model.named_parameters()), dict(other.named_parameters()))


def test_a_kind_that_does_not_complete_gradients_is_none() -> None:
    class Nothing(Ranks):
        kind = "nothing"

    with pytest.raises(TypeError, match="complete"):
        Nothing()
