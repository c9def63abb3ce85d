"""The trunk and the heads: shapes, arguments, and what heads may do to shared features."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mtaccum.errors import ConfigError
from mtaccum.model.heads import DenseHead, PooledHead
from mtaccum.model.trunks import ConvTrunk

HEADS: list[Callable[[], nn.Module]] = [lambda: DenseHead(8, 5, 6), lambda: PooledHead(8, 5, 6)]


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 48), (33, 30), (7, 9)])
def test_trunk_halves_the_resolution_of_any_image(height: int, width: int) -> None:
    trunk = ConvTrunk(3, widths=(8, 12, 16))
    features = trunk(torch.randn(2, 3, height, width))
    assert trunk.out_channels == 8
    assert trunk.stride == 2
    assert features.shape == (2, 8, (height + 1) // 2, (width + 1) // 2)


@pytest.mark.parametrize("widths", [(8,), (8, 12), (4, 6, 8, 10)])
def test_trunk_takes_any_number_of_levels(widths: tuple[int, ...]) -> None:
    features = ConvTrunk(1, widths=widths, blocks=2)(torch.randn(2, 1, 32, 32))
    assert features.shape == (2, widths[0], 16, 16)


def test_every_parameter_of_trunk_and_heads_gets_a_gradient() -> None:
    trunk = ConvTrunk()
    dense, pooled = DenseHead(trunk.out_channels, 11), PooledHead(trunk.out_channels, 10)
    features = trunk(torch.randn(4, 1, 32, 32))
    (dense(features).square().mean() + pooled(features).square().mean()).backward()
    for module in (trunk, dense, pooled):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_trunk_normalises_by_batch() -> None:
    trunk = ConvTrunk()
    norms = [m for m in trunk.modules() if isinstance(m, nn.BatchNorm2d)]
    convolutions = [m for m in trunk.modules() if isinstance(m, nn.Conv2d)]
    assert len(norms) == len(convolutions)
    assert all(c.bias is None for c in convolutions)
    images = torch.randn(4, 1, 32, 32)
    trunk.eval()
    assert torch.allclose(trunk(images)[:1], trunk(images[:1]), atol=1e-5)


def test_default_trunk_is_small_but_holds_most_of_the_model() -> None:
    trunk = ConvTrunk()
    heads = [DenseHead(trunk.out_channels, 11), PooledHead(trunk.out_channels, 10)]
    assert 100_000 < parameters(trunk) < 400_000
    assert sum(map(parameters, heads)) < parameters(trunk) / 4


def test_dense_head_keeps_the_resolution() -> None:
    assert DenseHead(8, 5)(torch.randn(2, 8, 7, 9)).shape == (2, 5, 7, 9)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (16, 16), (32, 32)])
def test_pooled_head_takes_any_size(size: tuple[int, int]) -> None:
    assert PooledHead(8, 5)(torch.randn(2, 8, *size)).shape == (2, 5)


def test_pooled_head_reads_raw_images() -> None:
    assert PooledHead(1, 10)(torch.rand(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("make", HEADS)
def test_head_leaves_shared_features_alone(make: Callable[[], nn.Module]) -> None:
    head = make()
    features = torch.randn(2, 8, 6, 6, requires_grad=True)
    before, version = features.detach().clone(), features._version
    head(features).sum().backward()
    assert features._version == version
    assert torch.equal(features, before)
    assert features.grad is not None
    assert features.grad.abs().sum() > 0


@pytest.mark.parametrize("make", HEADS)
def test_head_outputs_raw_values_of_both_signs(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    output = make()(torch.randn(16, 8, 6, 6))
    assert output.min() < 0 < output.max()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvTrunk(0), "in_channels=0"),
        (lambda: ConvTrunk(widths=()), r"widths=\(\)"),
        (lambda: ConvTrunk(widths=(8, 0)), r"widths=\(8, 0\)"),
        (lambda: ConvTrunk(blocks=0), "blocks=0"),
        (lambda: DenseHead(0, 1), "in_channels must be at least 1, got 0"),
        (lambda: PooledHead(1, 0), "out_features must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
