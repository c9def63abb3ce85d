"""A plain training script with five heads, as people write them: the forward returns all outputs at once."""

import torch
import torch.nn.functional as F
from torch import nn

from mtaccum import split_backward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)
        )
        self.seg = nn.Conv2d(16, 5, 1)
        self.depth = nn.Conv2d(16, 1, 1)
        self.normals = nn.Conv2d(16, 3, 1)
        self.edges = nn.Conv2d(16, 1, 1)
        self.scene = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, image):
        f = self.backbone(image)
        return self.seg(f), self.depth(f), self.normals(f), self.edges(f), self.scene(f)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        image = torch.rand(8, 3, 16, 16, generator=generator)
        yield {
            "image": image,
            "seg": torch.randint(5, (8, 16, 16), generator=generator),
            "depth": image.mean(1, keepdim=True),
            "normals": image * 2 - 1,
            "edges": (image[:, :1] > 0.5).float(),
            "scene": torch.randint(4, (8,), generator=generator),
        }


def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        losses = {
            "seg": lambda f: F.cross_entropy(net.seg(f), batch["seg"]),
            "depth": lambda f: 0.5 * F.l1_loss(net.depth(f), batch["depth"]),
            "normals": lambda f: F.mse_loss(net.normals(f), batch["normals"]),
            "edges": lambda f: F.binary_cross_entropy_with_logits(net.edges(f), batch["edges"]),
            "scene": lambda f: 0.2 * F.cross_entropy(net.scene(f), batch["scene"]),
        }
        split_backward(net.backbone(batch["image"]), losses)
        optimizer.step()
    return net


if __name__ == "__main__":
    main()
