"""Sharded parameters: what each rank holds, what is refused, and unsharded models again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Failing, Squared, assert_equal_states, plain_batch, plain_model
from pool import Pool
from ranked import batch, full_parameters, raised, tree
from torch import Tensor, nn

from mtaccum import Engine, MultiTaskModel
from mtaccum.parallel import (
    current_ranks,
    distribute_like,
    full_tensor,
    is_sharded,
    shard,
    to_local,
    unsharded,
)


def held() -> dict[str, Any]:
    """What a rank has of a model, and what it was."""
    model = tree(seed=current_ranks().rank)
    shard(model)
    shard(model)  # once more does nothing
    held = {name: to_local(parameter).numel() for name, parameter in model.named_parameters()}
    return {"names": list(model.state_dict()), "held": held, "full": full_parameters(model)}


def test_each_rank_has_a_shard_of_what_rank_0_had(pool: Pool) -> None:
    model = tree(seed=0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    found = pool.run(held, ranks=3)

    for of_rank in found:
        assert of_rank["names"] == list(model.state_dict())
        assert_equal_states(of_rank["full"], dict(model.named_parameters()))
    assert {name: sum(of_rank["held"][name] for of_rank in found) for name in sizes} == sizes
    assert max(of_rank["held"]["trunk.conv.weight"] for of_rank in found) < sizes["trunk.conv.weight"]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def frozen_head() -> MultiTaskModel:
    model = plain_model()
    model.task("value").mode = "frozen"
    return model


def with_trunk(trunk: Callable[[], nn.Module]) -> MultiTaskModel:
    return MultiTaskModel(trunk(), {"a": Squared(nn.Linear(3, 1))}, inputs="x")


REFUSED = {
    "tied": (
        partial(tree, tied=True),
        "can't shard parameters that nodes share, and 'terms' and 'again' do",
    ),
    "frozen": (frozen_head, "can't freeze a head while its trunk learns, as mode=frozen of 'value' asks"),
    "scalar": (partial(with_trunk, Scalar), "can't shard the module of 'trunk': "),
    "container": (partial(with_trunk, partial(nn.ModuleList, [nn.Linear(3, 3)])), "of 'trunk': "),
}


def refused(build: Callable[[], MultiTaskModel]) -> str:
    return raised(shard, build())


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cant_be_sharded_are_refused_by_name(pool: Pool, what: str) -> None:
    build, message = REFUSED[what]
    for error in pool.run(refused, build):
        assert error.startswith("ConfigError: parallel=fsdp ")
        assert message in error


def engines() -> dict[str, str]:
    bare, model = plain_model(), plain_model()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitting = raised(Engine, model, optimizer, parallel="fsdp"), raised(Engine, model, optimizer)
    return {
        "fitting": " ".join(fitting),
        "not sharded": raised(Engine, bare, parallel="fsdp"),
        "as ddp": raised(Engine, model, optimizer, parallel="ddp"),
        "as none": raised(Engine, model, optimizer, parallel="none"),
        "chunks": raised(Engine, model, optimizer, chunks={"cls": 2}),
        "compile": raised(Engine, model, optimizer, compile=True),
        "comm_hook": raised(Engine, model, optimizer, comm_hook="fp16"),
        "scaler": raised(Engine, model, optimizer, scaler=torch.amp.GradScaler("cpu")),
        "sync": raised(Engine, tree(), batchnorm="sync"),
    }


def test_engines_refuse_what_doesnt_go_together(pool: Pool) -> None:
    for errors in pool.run(engines):
        assert errors["fitting"] == "nothing was raised nothing was raised"
        assert "call mtaccum.parallel.shard(model) before" in errors["not sharded"]
        for kind in ("ddp", "none"):
            assert f"sharded over the ranks, so parallel='{kind}' can't train it" in errors[f"as {kind}"]
        for option in ("chunks", "compile", "comm_hook", "scaler"):
            assert errors[option].startswith(f"ConfigError: {option} doesn't go with parallel=fsdp; use ")
        assert "batchnorm=sync works on CUDA only" in errors["sync"]


# --- unsharded models --------------------------------------------------------------------------------------


def unsharded_copies() -> dict[str, Any]:
    """Predictions of an unsharded model, on rank 0 only and after the original has learned more."""
    ranks = current_ranks()
    model = tree()
    shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.step([batch(1), batch(2)])
    model.task("seg").weight, model.task("cls").mode = 0.25, "off"
    model.eval()
    parameters, buffers = full_parameters(model), copy.deepcopy(dict(model.named_buffers()))
    one = unsharded(model)
    found = {"parameters": parameters, "buffers": buffers, "state": one.state_dict()}
    found["settings"] = one.task("seg").weight, one.task("cls").mode, one.training, is_sharded(one)
    if ranks.is_rank_zero:  # the others run nothing
        found["first"] = one(batch(3))
    model.train()
    engine.step([batch(4), batch(5)])
    one.train()
    one(batch(6))  # moves its own running statistics
    found["later"] = {name: full_tensor(p.detach()) for name, p in one.named_parameters()}
    found["moved"] = [n for n, b in model.named_buffers() if torch.equal(b, dict(one.named_buffers())[n])]
    return found


def test_an_unsharded_model_is_full_and_independent(pool: Pool) -> None:
    found = pool.run(unsharded_copies)

    model = tree()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for of_rank in found:
        assert of_rank["settings"] == (0.25, "off", False, False)
        assert list(of_rank["state"]) == list(model.state_dict())
        assert_equal_states(of_rank["later"], of_rank["parameters"])
        for name, parameter in of_rank["parameters"].items():
            assert torch.equal(of_rank["state"][name], parameter)
        assert of_rank["moved"] == ["tasks.cls.class_weights"]
    model.trunk.unused.requires_grad_(False)
    engine.step([batch(1), batch(2), batch(1), batch(2)])
    for name, buffer in model.named_buffers():
        buffer.copy_(found[0]["buffers"][name])
    model.eval()
    for task, prediction in found[0]["first"].items():
        torch.testing.assert_close(prediction, model(batch(3))[task], rtol=1e-10, atol=1e-10)


def sharded_again() -> list[Tensor]:
    model = plain_model()
    shard(model)
    like = dict(model.named_parameters())["tasks.cls.head.weight"]
    values = torch.arange(32.0).reshape(4, 8) * (1 + current_ranks().rank)
    sharded = distribute_like(values, like)
    other_shape, bare = torch.ones(3), torch.ones(4, 8)
    assert distribute_like(other_shape, like) is other_shape
    assert distribute_like(bare, bare) is bare
    return [full_tensor(sharded), to_local(sharded)]


def test_tensors_are_sharded_as_parameters_are(pool: Pool) -> None:
    (all_of_it, first), (again, second) = pool.run(sharded_again)

    assert torch.equal(all_of_it, torch.arange(32.0).reshape(4, 8))
    assert torch.equal(again, all_of_it)
    assert torch.equal(torch.cat([first, second]), all_of_it)


# --- in and after a step -----------------------------------------------------------------------------------


def frozen_mode_later() -> str:
    model = plain_model()
    shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.task("value").mode = "frozen"
    return raised(engine.step, [plain_batch(3)])


def test_a_head_cant_be_frozen_later_while_its_trunk_learns(pool: Pool) -> None:
    for error in pool.run(frozen_mode_later):
        assert error.startswith("ConfigError: parallel=fsdp can't freeze a head")


def failing() -> list[str]:
    head = Failing(nn.Linear(3, 1), RuntimeError("out of luck"))
    model = MultiTaskModel(nn.Linear(3, 3), {"a": Squared(head)}, inputs="x").double()
    shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    errors = [raised(engine.step, [plain_batch(2)])]
    head.broken = False
    return [*errors, raised(engine.step, [plain_batch(2)]), raised(engine.accumulate, [plain_batch(2)])]


def test_after_an_error_in_a_pass_it_cant_go_on(pool: Pool) -> None:
    for error, *later in pool.run(failing):
        assert "out of luck" in error
        for refusal in later:
            assert refusal.startswith("TaskError: an earlier step failed while parameters were gathered")


class Hooked(nn.Linear):
    """Notes how many hooks are on its weight each time that it runs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.hooks: list[int] = []

    def forward(self, features: Tensor) -> Tensor:
        self.hooks.append(len(self.weight._backward_hooks or ()))
        return super().forward(features)


def hooks_of_three_steps() -> list[int]:
    trunk = Hooked(3, 3)
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(3, 1))}, inputs="x").double()
    shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        engine.step([plain_batch(2)])
    return trunk.hooks


def test_hooks_do_not_become_more_with_each_step(pool: Pool) -> None:
    for hooks in pool.run(hooks_of_three_steps):
        assert hooks == [1, 1, 1]


def nothing_to_do() -> list[Any]:
    """Windows without labels, without batches, and without tasks."""
    model = plain_model()
    shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    unlabelled = {"x": plain_batch(2)["x"], "cls": None, "value": None, "other": None}
    results = [engine.step([unlabelled] if current_ranks().is_rank_zero else []), engine.step([])]
    for task in model.tasks_by_name().values():
        task.mode = "off"
    return [*results, engine.step([plain_batch(2)])]


def test_a_window_without_anything_to_learn_is_no_step(pool: Pool) -> None:
    for results in pool.run(nothing_to_do):
        assert [result.stepped for result in results] == [False] * 3
        assert [len(result.idle) for result in results] == [3, 3, 0]
