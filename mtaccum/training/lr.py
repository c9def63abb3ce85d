"""The learning rate: its course over the training, and its factor for a larger batch."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

SCALES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def batch_factor(scale: str, batch_size: int, base_batch_size: int | None, ranks: int = 1) -> float:
    """Factor of the learning rate for a batch larger than the one it was chosen for.

    (batch_size * ranks / base_batch_size) to the power of 0 (``none``), 1/2 (``sqrt``) or 1 (``linear``).
    In how many micro-batches the batch is run doesn't enter.
    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017 (linear); Krizhevsky, One weird trick for
    parallelizing convolutional neural networks, 2014 (square root).
    """
    if scale == "none":
        return 1.0
    assert base_batch_size is not None, "checked with the configuration"
    return float((batch_size * ranks / base_batch_size) ** SCALES[scale])


def course(name: str, step: int, total_steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Factor of the learning rate in optimizer step ``step`` (from 0): a linear rise over
    ``warmup_steps``, then ``constant`` at 1, or a half ``cosine`` down to ``final_fraction`` at the end.

    Sources: Goyal et al. 2017 (warm-up); Loshchilov and Hutter, SGDR, 2017 (cosine).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def make_lr_scheduler(
    optimizer: Optimizer, name: str, total_steps: int, warmup_steps: int, final_fraction: float
) -> LambdaLR:
    """A scheduler that ticks once per optimizer step."""
    return LambdaLR(optimizer, lambda step: course(name, step, total_steps, warmup_steps, final_fraction))
