"""Budgets: what is given, what is free, what a card that isn't there needs to be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtaccum import ConfigError
from mtaccum.planning import Budget, budget, budget_of
from mtaccum.planning.budget import device_bytes, free_bytes

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 24 GiB of which 20 are free and 1 is cached by the allocator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * GIB)


def test_a_budget_that_is_given_is_all_for_tensors_on_the_cpu() -> None:
    assert budget_of("1.5GiB", "cpu") == Budget(3 * GIB // 2, 0, "cpu", absent=False, given=True)
    assert budget_of(1000, "cpu").tensor_bytes == 1000
    assert str(budget_of("1GiB", "cpu")) == "budget 1.00 GiB on cpu"


def test_without_a_budget_it_is_what_is_free_less_a_reserve() -> None:
    found = budget_of(None, CPU)
    assert not found.given
    assert 0 < found.total_bytes <= device_bytes(CPU)
    assert found.reserve_bytes == pytest.approx(0.1 * found.total_bytes, abs=1)
    assert found.tensor_bytes == found.total_bytes - found.reserve_bytes
    assert "which is what is free" in str(found)
    assert "in reserve" in str(found)


def test_what_is_free_is_no_more_than_there_is() -> None:
    assert 0 < free_bytes(CPU) <= device_bytes(CPU)


def test_a_container_has_what_its_control_group_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_container_limit", lambda: 7 * 2**20)
    assert device_bytes(CPU) == 7 * 2**20
    assert free_bytes(CPU) == 7 * 2**20
    with pytest.raises(ConfigError, match="more than cpu has, 7.0 MiB"):
        budget_of("8MiB", "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_than_there_is_is_refused_with_what_there_is(device: str, card: None) -> None:
    with pytest.raises(
        ConfigError, match=rf"'4000TiB' is more than {device} has, [0-9.]+ [KMG]iB\. Valid is up to"
    ):
        budget_of("4000TiB", device)


def test_all_that_there_is_is_accepted() -> None:
    assert budget_of(device_bytes(CPU), "cpu").total_bytes == device_bytes(CPU)


@pytest.mark.parametrize("given", ["6GiBs", 0, -1, True, "", "6 potatoes", float("nan")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_no_amount_is_refused(given: Any, device: str, no_card: None) -> None:
    with pytest.raises(ConfigError, match=r"memory\.budget: .* is no amount of memory\. Valid is .*6GiB"):
        budget_of(given, device)


def test_a_card_that_is_not_there_needs_a_budget(no_card: None) -> None:
    with pytest.raises(ConfigError, match=r"memory\.budget is needed .* such as 24GiB"):
        budget_of(None, "cuda")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", CUDA])
def test_a_card_that_is_not_there_has_a_reserve(device: Any, no_card: None) -> None:
    found = budget_of("24GiB", device)
    assert (found.total_bytes, found.device, found.absent) == (24 * GIB, "cuda", True)
    assert found.reserve_bytes == 768 * 2**20 + int(0.05 * 24 * GIB)
    assert "for context, workspaces and fragmentation" in str(found)


def test_a_card_that_is_not_there_may_be_of_any_size(no_card: None) -> None:
    assert budget_of("4000TiB", "cuda").total_bytes == 4000 * 2**40


def test_a_card_that_is_there_gives_what_is_free_and_what_its_allocator_holds(card: None) -> None:
    found = budget_of(None, "cuda")
    assert (found.total_bytes, found.absent, found.given) == (21 * GIB, False, False)
    assert found.reserve_bytes == 768 * 2**20 + int(0.05 * 21 * GIB)


def test_what_the_reserve_eats_up_is_refused(no_card: None) -> None:
    with pytest.raises(ConfigError, match=r"512\.0 MiB leaves nothing for tensors, since 793\.6 MiB"):
        budget_of("512MiB", "cuda")


@pytest.mark.parametrize("device", ["mps", "meta", "xpu"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"cpu and cuda, not for {device}"):
        budget_of("1GiB", device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_card_has_a_budget() -> None:
    found = budget_of(None, "cuda")
    assert not found.absent
    assert 0 < found.tensor_bytes < device_bytes(CUDA)
