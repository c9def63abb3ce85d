"""Task heads on a shared feature map: one for a label per pixel, one for a label per image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtaccum.errors import ConfigError, FeatureError


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def _check_map(features: object) -> None:
    if not isinstance(features, Tensor) or features.dim() != 4:
        raise FeatureError("the built-in head needs one tensor (batch, channels, height, width); give head=.")


class DenseHead(nn.Module):
    """Per-pixel head: 3x3 convolution, batch normalisation, ReLU, 1x1 convolution.

    Maps ``(batch, in_channels, h, w)`` to ``(batch, out_channels, h, w)``, raw values (logits or
    regression) at the resolution of the features; resizing to the image is left to the task.
    It reads the features and never writes into them, since other heads read them too.

    Args:
        in_channels: channels of the features.
        out_channels: channels of the output, such as the number of classes.
        hidden: channels of the hidden layer.

    Raises:
        ConfigError: if an argument is less than 1.
    """

    def __init__(self, in_channels: int, out_channels: int, hidden: int = 32) -> None:
        super().__init__()
        _check_positive(in_channels=in_channels, out_channels=out_channels, hidden=hidden)
        self.hidden = nn.Conv2d(in_channels, hidden, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(hidden)
        self.output = nn.Conv2d(hidden, out_channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``(b, in_channels, h, w)`` to ``(b, out_channels, h, w)``."""
        _check_map(features)
        hidden = F.relu(self.norm(self.hidden(features)))
        output: Tensor = self.output(hidden)
        return output


class PooledHead(nn.Module):
    """Per-image head: strided 3x3 convolution, batch normalisation, ReLU, pooling, linear layer.

    Maps ``(batch, in_channels, h, w)`` to ``(batch, out_features)``, raw values, for any spatial
    size from 1x1 on. The pooling takes the mean and the maximum over all positions: the mean
    measures how much there is of something, the maximum whether it's there at all. It reads the
    features and never writes into them, since other heads read them too.

    Args:
        in_channels: channels of the features, or of the image if the head reads raw images.
        out_features: numbers per image, such as the number of classes.
        hidden: channels of the hidden layer.

    Raises:
        ConfigError: if an argument is less than 1.
    """

    def __init__(self, in_channels: int, out_features: int, hidden: int = 64) -> None:
        super().__init__()
        _check_positive(in_channels=in_channels, out_features=out_features, hidden=hidden)
        self.hidden = nn.Conv2d(in_channels, hidden, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(hidden)
        self.output = nn.Linear(2 * hidden, out_features)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``(b, in_channels, h, w)`` to ``(b, out_features)``."""
        _check_map(features)
        hidden = F.relu(self.norm(self.hidden(features)))
        pooled = torch.cat([hidden.mean(dim=(2, 3)), hidden.amax(dim=(2, 3))], dim=1)
        output: Tensor = self.output(pooled)
        return output
