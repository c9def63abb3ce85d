"""A fourth kind of ranks, as a user may write one: each gradient is added up by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from mtaccum.parallel import Ranks


class PlainAllReduce(Ranks):
    """Gradients become their sum over the ranks, one all-reduce for each; None where no rank has one."""

    kind: ClassVar[str] = "plain"
    averages: ClassVar[bool] = False

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        used = self.collectives.all_reduce_max([float(p.grad is not None) for p in parameters])
        for parameter, by_any_rank in zip(parameters, used, strict=True):
            if by_any_rank:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.collectives.all_reduce_tensor(parameter.grad)
