"""The table of what goes together, cell by cell on two ranks: a step works there, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from ranked import assert_equal_gradients, engine_of, full_gradients, made
from torch import Tensor, nn

from mtaccum import ConfigError, Engine, MultiTaskModel, Regression
from mtaccum.engine.options import EXAMPLES, compatibility
from mtaccum.parallel import KINDS, current_ranks

HERE = {"compile": {"compile": {"backend": "eager"}}}  # a compiler takes long, and is the same on every rank
FOR_CUDA = {"offload": "offload keeps", "batchnorm=sync": "batchnorm=sync works on CUDA only"}
TOLERANCES = {"precision=bf16": 0.03, "precision=fp16": 0.01, "comm_hook=fp16": 0.01}


def two_heads() -> MultiTaskModel:
    torch.manual_seed(0)
    heads = {name: Regression(2, head=nn.Linear(3, 2), target=name, criterion="mse") for name in ("a", "b")}
    return MultiTaskModel(nn.Linear(3, 3), heads, inputs="x")


def window(rank: int) -> list[Any]:
    """Two micro-batches, of which rank 1 has no label of ``b``."""
    random = torch.Generator().manual_seed(rank)
    batches = [{key: torch.randn(4 - i, 3 - (key != "x"), generator=random) for key in "xab"} for i in (0, 1)]
    return (
        batches
        if rank == 0
        else [{**batch, "b": torch.full_like(batch["b"], torch.nan)} for batch in batches]
    )


def outcome(kind: str, options: dict[str, Any]) -> str | dict[str, Tensor | None]:
    """The error of making an engine, or the gradients of a step with it; before clipping."""
    seen: dict[str, Tensor | None] = {}
    model = made(two_heads, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options["on_gradients"] = lambda model: seen.update(full_gradients(model))
    try:
        engine, own = engine_of(kind, model, optimizer, **options), window(current_ranks().rank)
    except ConfigError as error:
        return str(error)
    # a new loss scale may be too large at first
    assert any(engine.step(own).stepped for _ in range(20))
    return seen


def table_of(kind: str) -> dict[tuple[str, str], str | dict[str, Tensor | None]]:
    """What comes of each cell."""
    cells = [(name, schedule) for name, schedule, *_ in compatibility({kind: KINDS[kind]})]
    return {
        (name, schedule): outcome(kind, {"schedule": schedule, **HERE.get(name, EXAMPLES[name])})
        for name, schedule in cells
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_cell_of_the_table_is_what_happens_on_two_ranks(pool: Pool, kind: str) -> None:
    model = two_heads()
    Engine(model, schedule="summed").accumulate([batch for rank in (0, 1) for batch in window(rank)])
    joint = {name: parameter.grad for name, parameter in model.named_parameters()}
    reasons = {(name, schedule): reason for name, schedule, _, reason in compatibility({kind: KINDS[kind]})}
    assert len(reasons) == 3 * len(EXAMPLES)
    for found in pool.run(table_of, kind):
        assert found.keys() == reasons.keys()
        for (name, schedule), reason in reasons.items():
            cell = found[name, schedule]
            if reason is not None:
                assert cell == reason
            elif name in FOR_CUDA:
                assert str(cell).startswith(FOR_CUDA[name]), (name, schedule, cell)
            else:
                assert isinstance(cell, dict), (name, schedule, cell)
                assert_equal_gradients(cell, joint, TOLERANCES.get(name, 1e-6))
