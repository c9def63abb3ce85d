"""What ranks must have alike, and models that one process trains without a thought."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal_states, plain_batch, plain_model
from plain_ranks import PlainAllReduce
from pool import Pool
from ranked import KINDS, engine_of, full_parameters, made, raised
from torch import Tensor, nn

from mtaccum import Classification, Engine, MultiTaskModel, Regression, check_exactness, find_plan
from mtaccum.parallel import DDP, Collectives, SingleProcess, current_ranks


def other_model(what: str) -> str:
    mine = current_ranks().rank == 1
    classes = 4 if mine and what == "classes" else 3
    task = Classification(classes, head=nn.Linear(4, classes))
    model = MultiTaskModel(nn.Linear(4, 4), {"a": task}, inputs="x")
    if mine and what == "frozen":
        model.trunk.bias.requires_grad_(False)
    if mine and what == "more":
        model.trunk.register_buffer("scale", torch.ones(1))
    return raised(Engine, model)


DIFFERENT = {
    "classes": ("tasks.a.head.weight (4, 4) of torch.float32, trainable", "tasks.a.head.weight (3, 4)"),
    "frozen": (
        "trunk.bias (4,) of torch.float32, not trainable",
        "trunk.bias (4,) of torch.float32, trainable",
    ),
    "more": ("trunk.scale (1,) of torch.float32, not trainable", "nothing"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_differ_are_refused_on_all_ranks(pool: Pool, what: str) -> None:
    second, first = DIFFERENT[what]
    errors = pool.run(other_model, what, ranks=2)
    for error, (rank, own), (other, theirs) in zip(
        errors, ((0, first), (1, second)), ((1, second), (0, first)), strict=True
    ):
        assert error.startswith(
            f"ConfigError: all ranks must train the same model, but rank {rank} has {own}"
        )
        assert f"where rank {other} has {theirs}" in error


def late() -> list[str]:
    """What steps of engines say that were made before there was a group."""
    engine = Engine(plain_model())
    engine.ranks = SingleProcess(on_purpose=False)
    handed_in = [Engine(plain_model(), parallel=kind(Collectives())) for kind in (DDP, PlainAllReduce)]
    return [raised(each.accumulate, [plain_batch(3)]) for each in (engine, *handed_in)]


def test_an_engine_from_before_the_ranks_were_joined_is_refused(pool: Pool) -> None:
    for errors in pool.run(late, ranks=2):
        for refused in errors:
            assert refused.startswith("ConfigError: the engine was made before the ranks were joined")


def by_themselves() -> list[str]:
    engines = [Engine(plain_model(), parallel=given) for given in ("none", SingleProcess())]
    return [raised(engine.accumulate, [plain_batch(3)]) for engine in engines]


def test_a_rank_trains_by_itself_where_that_is_asked_for(pool: Pool) -> None:
    assert pool.run(by_themselves, ranks=2) == [["nothing was raised"] * 2] * 2


def checked() -> list[bool]:
    rank, model = current_ranks().rank, plain_model()
    found = [check_exactness(model, [plain_batch(3 + rank, seed=rank)], schedule="sequential").exact]
    if rank == 0:  # nobody else takes part
        found.append(check_exactness(model, [plain_batch(2)], schedule="sequential").exact)
    return found


def test_a_check_of_exactness_is_each_ranks_own_v6(pool: Pool) -> None:
    assert pool.run(checked, ranks=2) == [[True, True], [True]]


class Rotated(nn.Module):
    """Its first parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).real


def complex_step() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MultiTaskModel(Rotated(), {"y": Regression(2, head=nn.Linear(4, 2), target="y")}, inputs="x")
    rank = current_ranks().rank
    Engine(model, torch.optim.SGD(model.parameters(), lr=0.1)).step(
        [{"x": torch.full((2, 4), 1.0 + rank), "y": torch.zeros(2, 2)}]
    )
    return full_parameters(model)


def test_complex_parameters_are_trained(pool: Pool) -> None:
    first, second = pool.run(complex_step, ranks=2)
    assert_equal_states(first, second)
    assert not torch.equal(first["trunk.phase"], torch.ones(4, dtype=torch.complex64))


DTYPES = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.bfloat16]


def odd_buffers() -> list[Tensor]:
    rank, model = current_ranks().rank, nn.Module()
    for index, dtype in enumerate(DTYPES):
        model.register_buffer(f"b{index}", torch.full((2, 3), 1.0 - rank).to(dtype).t())
    model.register_buffer("empty", torch.empty(0, dtype=torch.int16))
    model.register_buffer("one", torch.tensor(5 - rank, dtype=torch.int16))
    current_ranks().average_buffers(model)
    averaged = [
        model.get_buffer(f"b{index}").float() for index, d in enumerate(DTYPES) if d != torch.complex64
    ]
    current_ranks().broadcast_tensors(model)
    assert model.get_buffer("one") == 5
    return averaged


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_buffers_of_any_dtype_are_shared(pool: Pool) -> None:
    for found in pool.run(odd_buffers, ranks=2):
        assert [buffer.unique().tolist() for buffer in found] == [[1], [1], [1], [1], [0.5]]


class Uncertain(nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.layer, self.spread, self.copies = nn.Linear(4, 2), nn.Parameter(torch.zeros(2)), copies

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "mean": self.layer(x),
            "spread": self.spread.clone() if self.copies else self.spread.expand(3, 2),
        }


class Gaussian(Regression):
    def loss(self, prediction: Any, batch: Any) -> Tensor:
        error = (prediction["mean"] - batch["y"]).square()
        return (error * (-prediction["spread"]).exp() + prediction["spread"]).mean()


def own_parameter(kind: str, copies: bool) -> str:
    task = Gaussian(2, head=Uncertain(copies), target="y")
    model = made(lambda: MultiTaskModel(nn.Linear(4, 4), {"y": task}, inputs="x"), kind)
    engine = engine_of(kind, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return raised(engine.step, [{"x": torch.rand(3, 4), "y": torch.rand(3, 2)}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_returns_its_own_parameter_must_copy_it_under_fsdp(pool: Pool, kind: str) -> None:
    assert pool.run(own_parameter, kind, True, ranks=2) == ["nothing was raised"] * 2
    for error in pool.run(own_parameter, kind, False, ranks=2):
        if kind == "fsdp":
            assert "can't return its own parameter" in error
            assert "Return parameter.clone()" in error
        else:
            assert error == "nothing was raised"


def plan() -> list[Any]:
    report = find_plan(plain_model, plain_batch(3), budget_bytes="1GiB")
    assert report.recommended is not None
    plan = report.recommended
    return [plan.options, plan.accumulate, plan.peak_bytes]


def test_a_plan_can_be_found_beside_other_ranks(pool: Pool) -> None:
    assert pool.run(plan, ranks=2) == [plan()] * 2
