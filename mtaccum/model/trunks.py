"""A small convolutional trunk that encodes an image into one feature map shared by all heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum.errors import ConfigError


class _ConvNorm(nn.Sequential):
    """Convolution without bias (the normalisation brings its own) and batch normalisation."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(out_channels),
        )


class _Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut: ``(b, in, h, w)`` to ``(b, out, h/s, w/s)``."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _ConvNorm(in_channels, out_channels, 3, stride)
        self.second = _ConvNorm(out_channels, out_channels, 3)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = _ConvNorm(in_channels, out_channels, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(F.relu(self.first(inputs)))
        return F.relu(hidden + self.shortcut(inputs))


class ConvTrunk(nn.Module):
    """Residual encoder with a top-down path, batch normalisation throughout.

    The encoder halves the resolution at each level; the top-down path brings the context of the
    coarse levels back to the resolution of the first one. Most of the compute happens at
    low resolution, where a step is cheap.

    Maps ``(batch, in_channels, height, width)`` to one feature tensor
    ``(batch, out_channels, ceil(height / 2), ceil(width / 2))``, non-negative floats.

    Args:
        in_channels: channels of the image, 1 for grey values.
        widths: channels of the levels, from stride 2 to stride ``2 ** len(widths)``.
        blocks: residual blocks per level, at least 1.

    Attributes:
        out_channels: channels of the features, ``widths[0]``.
        stride: 2, the size of the image divided by the size of the features.

    Raises:
        ConfigError: if ``widths`` is empty, or a number is less than 1.
    """

    stride = 2

    def __init__(self, in_channels: int = 1, widths: Sequence[int] = (32, 64), blocks: int = 2) -> None:
        super().__init__()
        if not widths or min(in_channels, blocks, *widths) < 1:
            raise ConfigError(
                "in_channels, blocks and every entry of widths must be at least 1, got "
                f"in_channels={in_channels}, blocks={blocks}, widths={tuple(widths)}"
            )
        self.out_channels = widths[0]
        self.stem = _ConvNorm(in_channels, widths[0], 5, stride=2)
        self.levels = nn.ModuleList()
        for level, width in enumerate(widths):
            stages = [
                _Residual(widths[level - 1], width, stride=2)
                if level > 0 and block == 0
                else _Residual(width, width)
                for block in range(blocks)
            ]
            self.levels.append(nn.Sequential(*stages))
        # From coarse to fine: project the coarse level, then mix the sum.
        pairs = list(pairwise(widths))[::-1]
        self.laterals = nn.ModuleList(_ConvNorm(coarse, fine, 1) for fine, coarse in pairs)
        self.mixers = nn.ModuleList(_Residual(fine, fine) for fine, _ in pairs)

    def forward(self, images: Tensor) -> Tensor:
        """Encode ``(b, in_channels, h, w)`` as ``(b, out_channels, ceil(h/2), ceil(w/2))``."""
        features = F.relu(self.stem(images))
        skips: list[Tensor] = []
        for level in self.levels:
            features = level(features)
            skips.append(features)
        skips.pop()
        for lateral, mixer in zip(self.laterals, self.mixers, strict=True):
            skip = skips.pop()
            coarse = F.interpolate(
                lateral(features), size=skip.shape[-2:], mode="bilinear", align_corners=False
            )
            features = mixer(skip + coarse)
        return features
