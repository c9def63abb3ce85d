"""DDP: gradients become their mean over the ranks, by one pass through DistributedDataParallel per window.

All real passes run on the bare model, in whatever order and number each rank needs. At the window's end a
pass that touches every parameter and computes nothing goes through DistributedDataParallel, whose reducer
then averages the gradients that have been added up, in buckets, and with communication hooks if there are
any. Several synchronised passes, or one DDP per node, go wrong where ranks run different tasks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from mtaccum.errors import ConfigError, unknown_name
from mtaccum.parallel.collectives import Collectives, current_ranks
from mtaccum.parallel.dtensor import is_dtensor
from mtaccum.parallel.ranks import Ranks

COMM_HOOKS = {
    "none": None,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}


def wrapper_of(model: Any) -> str | None:
    """The name of the parallel wrapper that a model, or a module in it, is in; None if there is none."""
    modules = model.modules() if isinstance(model, nn.Module) else [model]
    return min({type(module).__name__ for module in modules} & WRAPPERS, default=None)


class DDP(Ranks):
    """Averages gradients over the ranks, once per window.

    Args:
        collectives: None: those of PyTorch's default process group.
        comm_hook: ``fp16`` or ``bf16``: gradients travel in 16 bits; ``none``: as they are.

    Raises:
        ConfigError: an unknown hook.
    """

    kind: ClassVar[str] = "ddp"

    def __init__(self, collectives: Collectives | None = None, comm_hook: str = "none") -> None:
        super().__init__(collectives)
        if comm_hook not in COMM_HOOKS:
            raise ConfigError(unknown_name("comm_hook", comm_hook, COMM_HOOKS))
        self.comm_hook = comm_hook
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._pass: DistributedDataParallel | None = None

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each trainable parameter the mean of its gradients; None where no rank has one."""
        # DTensors, of a trunk in tensor parallelism say, are reduced by their own means
        learning = [p for p in parameters if p.requires_grad and not is_dtensor(p)]
        if self.world_size == 1 or not learning:
            return
        used = self.collectives.all_reduce_max([_layout_of(parameter.grad) for parameter in learning])
        if _SPARSE in used:
            shape = tuple(learning[used.index(_SPARSE)].shape)
            raise ConfigError(
                f"a parameter of shape {shape} has a sparse gradient, which can't be reduced over the "
                f"ranks in one pass. Use sparse=False in its Embedding."
            )
        self._prepare(learning)
        assert self._pass is not None
        with torch.enable_grad():
            self._pass().backward()
        for parameter, by_any in zip(learning, used, strict=True):
            if not by_any:
                parameter.grad = None

    def _prepare(self, learning: list[nn.Parameter]) -> None:
        """A pass for these parameters, unless it is there already."""
        if len(self._parameters) == len(learning) and all(
            reference() is parameter for reference, parameter in zip(self._parameters, learning, strict=True)
        ):
            return
        self._parameters = [weakref.ref(parameter) for parameter in learning]
        # gradients become views of the buckets, so that there is one set of them
        self._pass = DistributedDataParallel(_Touching(learning), gradient_as_bucket_view=True)
        if (hook := COMM_HOOKS[self.comm_hook]) is not None:
            self._pass.register_comm_hook(None, hook)


_NONE, _DENSE, _SPARSE = 0.0, 1.0, 2.0


def _layout_of(gradient: Tensor | None) -> float:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


class _Touching(nn.Module):
    """Its forward touches every parameter, and computes nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.touched = nn.ParameterList(parameters)

    def forward(self) -> Tensor:
        result: Tensor = _Touch.apply(*self.touched)  # type: ignore[no-untyped-call, unused-ignore]
        return result


class _Touch(torch.autograd.Function):
    """Undefined gradients for all its inputs: nothing is added to what they have, and hooks are called."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.number = len(parameters)
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        return tuple(None for _ in range(ctx.number))


_of_loops: weakref.WeakKeyDictionary[nn.Module, DDP] = weakref.WeakKeyDictionary()


def reduce_gradients(model: nn.Module) -> None:
    """Give each trainable parameter of a model the mean of its gradients over the ranks; None where no rank
    has one. For loops of your own, after ``split_backward`` or ``Engine.accumulate`` and before the
    optimizer's step, on every rank:

        losses = split_backward(net.backbone(image), {...})
        mtaccum.reduce_gradients(net)
        optimizer.step()

    Give the bare model, not one inside DistributedDataParallel, say. On one rank it does nothing.

    Raises:
        ConfigError: a wrapped model.
    """
    if (wrapper := wrapper_of(model)) is not None:
        raise ConfigError(
            f"reduce_gradients takes the bare model, and this one is wrapped by {wrapper}, which reduces in "
            f"each backward, of which there are several. Don't wrap it."
        )
    if model not in _of_loops or _of_loops[model].collectives is not current_ranks():
        _of_loops[model] = DDP()
    _of_loops[model].complete(list(dict.fromkeys(model.parameters())))
