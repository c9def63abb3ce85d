"""Trunks and heads of timm and torchvision, which are imported when a model is built: they may be missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

__all__ = ["DilatedResNet", "OfTimm", "deeplab_head"]


class OfTimm(nn.Module):
    """The last map of a model of timm: images to (batch, channels, h, w)."""

    def __init__(self, name: str, pixels: int) -> None:
        super().__init__()
        timm: Any = import_module("timm")
        size = {"img_size": pixels} if name.startswith(("vit", "swin")) else {}
        self.body = timm.create_model(name, pretrained=False, features_only=True, **size)
        self.channels: int = self.body.feature_info.channels()[-1]

    def forward(self, images: Tensor) -> Tensor:
        last: Tensor = self.body(images)[-1]
        return last if last.shape[1] == self.channels else last.movedim(3, 1)  # Swin's channels are last


class DilatedResNet(nn.Module):
    """torchvision's ResNet-50 with stride 8, the stem and the four stages as children: images (batch, 3,
    height, width) to (batch, 2048, height / 8, width / 8)."""

    channels = 2048

    def __init__(self) -> None:
        super().__init__()
        resnet: Any = import_module("torchvision.models.resnet")
        body = resnet.resnet50(weights=None, replace_stride_with_dilation=[False, True, True])
        self.stem = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            body.layer1,
            body.layer2,
            body.layer3,
            body.layer4,
        )

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(images)))))
        return features


def deeplab_head(channels: int, classes: int) -> nn.Module:
    """The head of DeepLabv3 (Chen et al., 2017) as torchvision has it: to logits (batch, classes, h, w)."""
    module: Any = import_module("torchvision.models.segmentation.deeplabv3")
    head: nn.Module = module.DeepLabHead(channels, classes)
    return head
