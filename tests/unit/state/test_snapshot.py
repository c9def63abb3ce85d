"""Snapshots: buffers of every kind come back, in few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtaccum.observe import OperationObserver
from mtaccum.state import Snapshot


class Odd(nn.Module):
    """Buffers of many types, shapes and layouts, some shared, one None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("in_half", torch.ones(3, dtype=torch.float16))
        self.register_buffer("number", torch.tensor(4))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("small", torch.ones(2, dtype=torch.int8))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("again", self.norm.running_mean)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.to_dense().clone() for name, b in model.named_buffers(remove_duplicate=False)}


def test_every_buffer_comes_back_in_its_place() -> None:
    model = nn.ModuleList([Odd(), Odd()])
    before, own = values(model), dict(model.named_buffers())
    snapshot = Snapshot(model)
    for module in model:
        assert isinstance(module, Odd)
        for name in ("transposed", "in_half", "number", "small", "phase"):
            getattr(module, name).add_(1)
        module.flag.logical_not_()
        module.sparse = torch.zeros(2, 2).to_sparse()
        module.norm(torch.rand(4, 3))
        module.norm.running_var = torch.zeros(3)
    snapshot.restore()
    after = values(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(buffer is own[name] for name, buffer in model.named_buffers())


class Counted(OperationObserver):  # type: ignore[no-untyped-call]
    """How often memory is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.copies += str(func) in ("aten.clone.default", "aten.cat.default", "aten.copy_.default")
        return super().run(func, args, kwargs)


def test_many_small_buffers_are_copied_together() -> None:
    with Counted() as counted:
        Snapshot(nn.ModuleList([nn.BatchNorm1d(3) for _ in range(50)]))
    assert counted.copies == 2, "one for the statistics, one for the numbers of batches"


@pytest.mark.parametrize("spared", [True, False])
def test_modules_that_do_not_change_are_spared(spared: bool) -> None:
    norm = nn.BatchNorm1d(3)
    snapshot = Snapshot(nn.ModuleList([norm]), without=[norm] if spared else [])
    norm(torch.rand(4, 3))
    snapshot.restore()
    assert norm.num_batches_tracked == (1 if spared else 0)
