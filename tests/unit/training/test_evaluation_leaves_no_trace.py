"""An evaluation between two steps: the training goes on as if there had been none."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mtaccum
from mtaccum import MultiTaskModel, Regression
from mtaccum.state import RandomState


class Noisy(nn.Module):
    """Draws in evaluation mode too, from all three global streams."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(1) + np.random.rand() + random.random()


def test_an_evaluation_moves_no_random_stream_e13() -> None:
    model = MultiTaskModel(Noisy(), {"y": Regression(1, head=nn.Linear(3, 1), target="y")}, inputs="x")
    samples = [{"x": torch.rand(3), "y": torch.rand(1)} for _ in range(6)]
    loader = DataLoader(samples, batch_size=2, shuffle=True)  # draws the order, and a seed for its workers
    before = RandomState()
    assert "loss" in mtaccum.evaluate(model, loader)["y"]
    assert before.is_current()
