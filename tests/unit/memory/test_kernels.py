"""Results of fake kernels lie in memory as those of the CPU do: strides, and the bytes of their storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from ways import Way, way_of

from mtaccum import Engine, MultiTaskModel, Regression, Segmentation, split_batch
from mtaccum.memory import FakeTraining, measure_step
from mtaccum.memory.kernels import _LAYOUTS, CpuKernels

CHANNELS = 8


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm in eval mode": lambda x: F.batch_norm(x, torch.zeros(CHANNELS), torch.ones(CHANNELS)),
    "layer_norm of channels": lambda x: first(F.layer_norm(last(x), (CHANNELS,))),
    "layer_norm of rows": lambda x: F.layer_norm(x, (6,)),
    "log_softmax": lambda x: x.log_softmax(1),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "softplus": F.softplus,
    "glu": lambda x: F.glu(x, 1),
    "reflection pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replication pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "roll": lambda x: x.roll(1, 2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "fold": lambda x: F.fold(x.repeat(1, 9, 1, 1).reshape(2, 9 * CHANNELS, 36), 6, 3, padding=1),
    "unfold": lambda x: F.unfold(x, 3, padding=1).reshape(2, 9 * CHANNELS, 6, 6),
    # that nothing is corrected which is right already
    "conv2d": lambda x: F.conv2d(x, torch.rand(4, CHANNELS, 3, 3), padding=1),
    "gelu": F.gelu,
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "softmax": lambda x: x.softmax(1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}


def lie(op: Callable[[Tensor], Tensor], x_last: bool, gradient_last: bool, *, fake: bool) -> list[Any]:
    """Strides (of dimensions with more than one entry) and bytes of the result and of the gradient."""

    def made(shape: torch.Size | tuple[int, ...], channels_last: bool) -> Tensor:
        batch, channels, *size = shape
        return first(torch.rand(batch, *size, channels)) if channels_last else torch.rand(shape)

    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(CpuKernels())
        x = made((2, CHANNELS, 6, 6), x_last).requires_grad_()
        result = op(x)
        (gradient,) = torch.autograd.grad(result, x, made(result.shape, gradient_last))
        return [(tuple(t.shape), t.stride(), t.untyped_storage().nbytes()) for t in (result, gradient)]


@pytest.mark.parametrize("gradient_last", [False, True], ids=["gradient plain", "gradient channels last"])
@pytest.mark.parametrize("x_last", [False, True], ids=["input plain", "input channels last"])
@pytest.mark.parametrize("name", OPS)
def test_results_lie_in_memory_as_those_of_the_cpu(name: str, x_last: bool, gradient_last: bool) -> None:
    real = lie(OPS[name], x_last, gradient_last, fake=False)
    assert lie(OPS[name], x_last, gradient_last, fake=True) == real


def test_each_correction_is_needed_by_an_op_here() -> None:
    seen = set()

    class Noting(CpuKernels):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Noting():
        for op in OPS.values():
            op(torch.rand(2, CHANNELS, 6, 6, requires_grad=True)).sum().backward()
    assert set(_LAYOUTS) <= seen


class Mixing(nn.Module):
    """A convolution, a norm, and a linear layer over the positions, which needs rows."""

    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.mix = nn.Conv2d(channels, 8, 3, padding=1), norm, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.mix(y.flatten(2)).view_as(y)


class Folding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 72, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.fold(self.conv(x).flatten(2), (8, 8), 3, padding=1)


@pytest.mark.parametrize(
    "way", [way_of("summed"), way_of("split", 2), way_of("split", recompute=("trunk",))], ids=str
)
def test_a_model_in_channels_last_needs_what_is_predicted(way: Way) -> None:
    def build() -> MultiTaskModel:
        blocks = [Mixing(3, nn.GroupNorm(4, 8)), Mixing(8, nn.BatchNorm2d(8)), Folding()]
        trunk = nn.Sequential(*blocks).to(memory_format=torch.channels_last)
        tasks = {
            "seg": Segmentation(4, head=nn.Conv2d(8, 4, 1)),
            "depth": Regression(dense=True, head=nn.Conv2d(8, 1, 1)),
        }
        return MultiTaskModel(trunk, tasks, inputs="image")

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    batch = {
        "image": torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        "seg": torch.randint(4, (4, 8, 8)),
        "depth": torch.rand(4, 1, 8, 8),
    }
    model = build()
    engine = Engine(model, sgd(model), options=way.options)
    _, measured = measure_step(engine, split_batch(batch, way.accumulate))
    assert FakeTraining(build, batch, build_optimizer=sgd).predict(*way).peak_bytes == measured.peak_bytes
