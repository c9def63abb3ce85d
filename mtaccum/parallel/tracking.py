"""Gradient tracking: which parameters of a sharded module got a gradient, so that the others keep none.

``fully_shard`` reduces what has a gradient, and goes wrong where that isn't the same on all ranks: a loss may
use some of its head's layers only where there are labels for them. So all parameters of a node are given
zeros before its backward. Afterwards those that no rank's loss has reached lose them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.structure import map_tensors, tensors_of

_ATTRIBUTE = "_gradient_tracking"


class GradientTracking:
    """Looks on while a sharded module runs.

    Attributes:
        reached: names of the parameters that got a gradient.
        counts: whether gradients are noted; not those of a pass that only another rank learns from.
        reduces_after: the task with whose backward the module's gradients are reduced; None: none so far.
        broken: whether a pass has failed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.reached: set[str] = set()
        self.counts, self.broken = True, False
        self.reduces_after: str | None = None
        self._begun: list[list[bool]] = []  # for each input of the pass that begins: filled by its gradient
        self._noted: dict[str, Tensor] = {}
        vars(module)[_ATTRIBUTE] = self
        # PyTorch's own hooks gather the parameters between the first two of these, and before the third
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._gathered, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """PyTorch leads the inputs through a function whose backward makes zeros where there is no gradient.
        Behind a feature that only an idle head reads, layers would take these for gradients of theirs."""
        self._begun = []

        def wrap(tensor: Tensor) -> Tensor:
            if not (torch.is_grad_enabled() and tensor.requires_grad):
                return tensor
            self._begun.append([])
            wrapped: Tensor = _IfCame.apply(tensor, self._begun[-1])  # type: ignore[no-untyped-call, unused-ignore]
            return wrapped

        given: tuple[Any, Any] = map_tensors((args, kwargs), wrap, strict=False)
        return given

    def _gathered(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        inputs = [tensor for tensor in tensors_of((args, kwargs), strict=False) if tensor.requires_grad]
        for tensor, came in zip(inputs, self._begun, strict=False):
            tensor.register_hook(partial(_came, came))  # type: ignore[no-untyped-call]
        self._begun = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and self._noted.get(name) is not parameter:
                parameter.register_hook(partial(self._reached, name))  # type: ignore[no-untyped-call]
                self._noted[name] = parameter

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in tensors_of(output, strict=False):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _fill(module))  # type: ignore[no-untyped-call]

    def _reached(self, name: str, gradient: Tensor | None) -> None:
        if self.counts and gradient is not None:
            self.reached.add(name)


def tracking_of(module: nn.Module) -> GradientTracking:
    """What looks on at a sharded module."""
    tracking: GradientTracking = vars(module)[_ATTRIBUTE]
    return tracking


def _came(came: list[bool], gradient: Tensor | None) -> None:
    if gradient is not None:
        came.append(True)


def _fill(module: nn.Module) -> None:
    """Give all parameters that have no gradient zeros, where a module's backward begins."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class _IfCame(torch.autograd.Function):
    """A tensor, whose gradient is passed on if one has come to what a module made of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, came: list[bool]) -> Tensor:
        ctx.came = came
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return (gradients[0] if ctx.came else None), None
