"""Models for the memory and time benchmarks: one where many heads cost much, one where not."""

from __future__ import annotations

from torch import nn

__all__ = ["dense_model", "linear_model"]


def dense_model(heads: int, width: int = 128, classes: int = 13) -> tuple[nn.Module, list[nn.Module]]:
    """A small convolutional trunk and ``heads`` dense prediction heads.

    Meant for float32 input of shape (8, 3, 128, 128). The trunk has stride 4 and maps
    (batch, 3, height, width_px) to features (batch, ``width``, height / 4, width_px / 4); each
    head maps those to logits (batch, ``classes``, height, width_px). Heads share no parameters.

    With the default sizes the graph keeps, per step, 112 MiB for the trunk, features (4 MiB)
    included, and 22.5 MiB per head with its mean cross entropy.

    Args:
        heads: number of heads, at least 1.
        width: channels of the trunk's layers, of the features and within the heads.
        classes: channels of each head's output.

    Returns:
        The trunk and the list of heads.

    Raises:
        ValueError: if ``heads`` is below 1.
    """
    _check_heads(heads)
    # The strides come early, and no layer works on the full resolution: no kernel's temporaries
    # then reach above the tensors that the graph keeps.
    trunk = nn.Sequential(
        _block(3, width, stride=2),
        _block(width, width),
        _block(width, width, stride=2),
        *(_block(width, width) for _ in range(5)),
    )
    return trunk, [_dense_head(width, classes) for _ in range(heads)]


def linear_model(heads: int, width: int = 1024, classes: int = 10) -> tuple[nn.Module, list[nn.Module]]:
    """A three-layer perceptron and ``heads`` linear heads, meant for input of shape (256, 1024).

    The trunk maps (batch, ``width``) to features (batch, ``width``), each head those to logits
    (batch, ``classes``). A head's graph keeps next to nothing beyond the features, so running
    the heads one by one saves no memory here.

    Args:
        heads: number of heads, at least 1.
        width: size of the input, of the hidden layers and of the features.
        classes: size of each head's output.

    Returns:
        The trunk and the list of heads.

    Raises:
        ValueError: if ``heads`` is below 1.
    """
    _check_heads(heads)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers), [nn.Linear(width, classes) for _ in range(heads)]


def _check_heads(heads: int) -> None:
    if heads < 1:
        raise ValueError(f"a model needs at least one head, not {heads}")


def _block(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    # No bias: the normalisation after it would cancel it.
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    )


def _dense_head(width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        _block(width, width),
        _block(width, width),
        nn.Conv2d(width, classes, 1),
        nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False),
    )
