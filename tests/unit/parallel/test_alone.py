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
from mtaccum.parallel import (
    ALONE,
    Ranks,
    Reducer,
    by_torchrun,
    current_ranks,
    ddp,
    gathered,
    in_step,
    is_sharded,
    joined,
    launched,
    local,
    shard,
    spread_like,
    whole,
)
from mtaccum.parallel.launch import local_device

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group with nobody else in it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_group_a_process_is_alone() -> None:
    assert current_ranks() is ALONE
    assert (ALONE.rank, ALONE.size, ALONE.first) == (0, 1, True)
    assert not Ranks(1, 2).first


def test_a_group_of_one_is_alone_too(group_of_one: None) -> None:
    assert dist.is_initialized()
    assert current_ranks() is ALONE
    with joined() as ranks:
        assert ranks is ALONE


def test_alone_all_agree() -> None:
    thing = object()
    assert ALONE.sums([1.5, 2]) == ALONE.largest([1.5, 2]) == [1.5, 2]
    assert ALONE.gather(thing) == [thing]
    assert ALONE.of_first(thing) is thing
    ALONE.wait()
    tensor = torch.ones(2)
    assert ALONE.sum_tensor(tensor) is tensor
    assert torch.equal(tensor, torch.ones(2))


def test_alone_weights_and_buffers_stay() -> None:
    module = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ALONE.share(module, torch.ones(1))
    ALONE.average_buffers(module)
    assert_equal_states(dict(module.state_dict()), before)


def test_alone_windows_stay_as_they_are() -> None:
    windows = [[1, 2], [3], []]
    assert list(in_step(windows)) == windows
    assert list(in_step(iter(windows), ALONE)) == windows
    assert list(in_step([])) == []


def test_alone_gradients_stay_as_they_are() -> None:
    model = plain_model()
    Engine(model).accumulate([plain_batch(3, missing=9)])
    before = gradients_of(model)

    reduce_gradients(model)
    Reducer(ALONE, "fp16").reduce(list(model.parameters()))

    after = gradients_of(model)
    assert {n for n, g in before.items() if g is None} == {n for n, g in after.items() if g is None}
    assert all(torch.equal(after[n], g) for n, g in before.items() if g is not None)


def test_ranks_that_come_later_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, several = plain_model(), Ranks(0, 2)
    reduced: list[Ranks] = []
    monkeypatch.setattr(Reducer, "reduce", lambda self, parameters: reduced.append(self.ranks))

    reduce_gradients(model)
    monkeypatch.setattr(ddp, "current_ranks", lambda: several)
    reduce_gradients(model)
    reduce_gradients(model)

    assert reduced == [ALONE, several, several]


def test_alone_nothing_is_spread() -> None:
    model, tensor = plain_model(), torch.ones(2)
    shard(model)
    assert not is_sharded(model)
    assert gathered(model) is model
    assert local(tensor) is whole(tensor) is tensor
    assert spread_like(tensor, tensor) is tensor
    assert Engine(model, parallel="fsdp").ranks is ALONE


@pytest.mark.parametrize("hook", ["fp8", ""])
def test_communication_hooks_are_named(hook: str) -> None:
    for make in (lambda: Reducer(ALONE, hook), lambda: Engine(plain_model(), comm_hook=hook)):
        with pytest.raises(ConfigError, match=f"unknown comm_hook '{hook}'.*Known: bf16, fp16, none"):
            make()


@pytest.mark.parametrize("parallel", ["dp", ""])
def test_ways_to_train_in_parallel_are_named(parallel: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown parallel '{parallel}'.*Known: ddp, fsdp, none"):
        Engine(plain_model(), parallel=parallel)


@pytest.mark.parametrize("parallel", [None, "none", "ddp", "fsdp"])
def test_alone_every_way_does_the_same(parallel: str | None) -> None:
    models = plain_model(), plain_model()
    for model, how in zip(models, (None, parallel), strict=True):
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel=how)
        engine.step([plain_batch(3), plain_batch(2)])
        assert engine.ranks is ALONE
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


def test_joined_without_torchrun_is_alone() -> None:
    with joined() as ranks:
        assert ranks is ALONE
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


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device() == torch.device("cuda", 3)
