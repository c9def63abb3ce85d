"""One process: nothing is communicated, and what several ranks need changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import assert_equal_states, gradients_of, plain_batch, plain_model
from torch import nn

from mtaccum import ConfigError, Engine, reduce_gradients
from mtaccum.engine.options import COMM_HOOKS
from mtaccum.parallel import (
    DDP,
    Collectives,
    SingleProcess,
    by_torchrun,
    current_ranks,
    ddp,
    distribute_like,
    full_tensor,
    in_step,
    is_sharded,
    joined,
    launched,
    ranks,
    shard,
    to_local,
    unsharded,
)
from mtaccum.parallel.launch import local_device

SINGLE = Collectives()
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group with nobody else in it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group_there_is_a_single_process() -> None:
    assert current_ranks() is current_ranks()
    assert current_ranks() == SINGLE
    for one in (SINGLE, SingleProcess()):
        assert (one.rank, one.world_size, one.is_rank_zero) == (0, 1, True)
    assert not Collectives(1, 2).is_rank_zero


def test_a_process_group_of_one_is_a_single_process_too(group_of_one: None) -> None:
    assert dist.is_initialized()
    assert current_ranks() == SINGLE
    with joined() as joint:
        assert joint == SINGLE
    assert type(Engine(plain_model()).ranks) is SingleProcess


def test_a_single_process_agrees_with_itself() -> None:
    thing = object()
    assert SINGLE.all_reduce_sum([1.5, 2]) == SINGLE.all_reduce_max([1.5, 2]) == [1.5, 2]
    assert SINGLE.all_gather_object(thing) == [thing]
    assert SINGLE.broadcast_object(thing) is thing
    assert [SINGLE.any(flag) for flag in (True, False)] == [True, False]
    tensor = torch.ones(2)
    assert SINGLE.all_reduce_tensor(tensor) is tensor
    assert torch.equal(tensor, torch.ones(2))


def test_in_a_single_process_weights_and_buffers_stay() -> None:
    module = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    SINGLE.broadcast_tensors(module, torch.ones(1))
    SINGLE.average_buffers(module)
    assert_equal_states(dict(module.state_dict()), before)


def test_in_a_single_process_windows_stay_as_they_are() -> None:
    windows = [[1, 2], [3], []]
    assert list(in_step(windows)) == windows
    assert list(in_step(iter(windows), SINGLE)) == windows
    assert list(in_step([])) == []


def test_in_a_single_process_gradients_stay_as_they_are() -> None:
    model = plain_model()
    Engine(model).accumulate([plain_batch(3, missing=9)])
    before = gradients_of(model)

    reduce_gradients(model)
    DDP(SINGLE, "fp16").complete(list(model.parameters()))
    SingleProcess().complete(list(model.parameters()))

    after = gradients_of(model)
    assert {n for n, g in before.items() if g is None} == {n for n, g in after.items() if g is None}
    assert all(torch.equal(after[n], g) for n, g in before.items() if g is not None)


def test_ranks_that_come_later_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, several = plain_model(), Collectives(0, 2)
    reduced: list[Collectives] = []
    monkeypatch.setattr(DDP, "complete", lambda self, parameters: reduced.append(self.collectives))

    reduce_gradients(model)
    for module in (ddp, ranks):
        monkeypatch.setattr(module, "current_ranks", lambda: several)
    reduce_gradients(model)
    reduce_gradients(model)

    assert reduced == [SINGLE, several, several]


def test_in_a_single_process_nothing_is_sharded() -> None:
    model, tensor = plain_model(), torch.ones(2)
    shard(model)
    assert not is_sharded(model)
    assert unsharded(model) is model
    assert to_local(tensor) is full_tensor(tensor) is tensor
    assert distribute_like(tensor, tensor) is tensor
    assert type(Engine(model, parallel="fsdp").ranks) is SingleProcess


@pytest.mark.parametrize("hook", ["fp8", ""])
def test_communication_hooks_are_named(hook: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown comm_hook '{hook}'.*Known: bf16, fp16, none"):
        Engine(plain_model(), comm_hook=hook)
    with pytest.raises(ConfigError, match=f"unknown comm_hook '{hook}'.*Known: bf16, fp16, none"):
        ddp.DDP(comm_hook=hook)
    assert set(COMM_HOOKS) == set(ddp.COMM_HOOKS)


def test_a_communication_hook_that_doesnt_reach_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fp16' doesn't reach a DDP .*, whose own is 'none'"):
        Engine(plain_model(), parallel=ddp.DDP(), comm_hook="fp16")
    assert (
        Engine(plain_model(), parallel=ddp.DDP(comm_hook="fp16"), comm_hook="fp16").ranks.comm_hook == "fp16"
    )
    Engine(plain_model(), parallel=ddp.DDP(comm_hook="fp16"))


@pytest.mark.parametrize("parallel", ["dp", ""])
def test_ways_to_train_in_parallel_are_named(parallel: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown parallel '{parallel}'.*Known: ddp, fsdp, none"):
        Engine(plain_model(), parallel=parallel)


@pytest.mark.parametrize("parallel", [None, "none", "ddp", "fsdp"])
def test_in_a_single_process_every_way_does_the_same(parallel: str | None) -> None:
    models = plain_model(), plain_model()
    for model, kind in zip(models, (None, parallel), strict=True):
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel=kind)
        engine.step([plain_batch(3), plain_batch(2)])
        assert type(engine.ranks) is SingleProcess
    assert_equal_states(models[0].state_dict(), models[1].state_dict())


# --- how it was started -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_torchrun_is_known_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launched()
    assert not by_torchrun()
    for name, value in LAUNCHED.items():
        assert not by_torchrun()
        monkeypatch.setenv(name, value)
    assert by_torchrun()
    assert launched()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert by_torchrun()
    assert not launched()


def test_joined_without_torchrun_is_a_single_process() -> None:
    with joined() as joint:
        assert joint == SINGLE
        assert not dist.is_initialized()


def test_joined_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, float]] = []
    ended: list[bool] = []
    monkeypatch.setattr(dist, "init_process_group", lambda b, timeout: made.append((b, timeout.seconds)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)

    with joined(timeout_s=7):
        assert ended == []
    assert made == [("gloo", 7)]
    assert ended == [True]

    with pytest.raises(RuntimeError, match="lost"), joined():
        raise RuntimeError("lost")  # a group isn't ended with the others anywhere
    assert ended == [True]


def test_joined_on_gpus_each_rank_works_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    used: list[torch.device] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: made.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name, value in {**LAUNCHED, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)

    with joined():
        assert used == [torch.device("cuda", 1)]
    assert made == ["cpu:gloo,cuda:nccl"]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device() == torch.device("cuda", 3)
