"""Labels: tells a tracker which stage of a step runs, and what the tensors are that it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from mtaccum.memory.ledger import ACTIVATIONS, FEATURES, GRADIENTS, OPTIMIZER
from mtaccum.memory.tracker import LiveBytes
from mtaccum.observe import STEP, observing
from mtaccum.structure import tensors_of


@contextmanager
def labelling(live: LiveBytes, model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Around steps of an engine inside ``with live``: label what they make.

    Args:
        live: the tracker, with the optimizer's state labelled, if there is any.
        model: whose gradients are known by their parameters.
        optimizers: whose state is known after their first step.
    """
    labels = _Labels(live, optimizers)
    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = _after_accumulation(parameter, labels.gradient)
                stack.callback(hook.remove)
        stack.enter_context(observing(labels))
        # inside a recomputed segment PyTorch's own hooks are in force, and nothing is kept
        stack.enter_context(saved_tensors_hooks(labels.saved, lambda tensor: tensor))
        yield


class _Labels:
    """Labels tensors of a step as they become known; a ``StageObserver``."""

    def __init__(self, live: LiveBytes, optimizers: Sequence[Optimizer]) -> None:
        self._live, self._optimizers = live, optimizers
        self._stages: list[str] = []

    def begins(self, node: str, phase: str) -> None:
        self._stages.append(self._live.stage)
        self._live.stage = f"{node} {phase}"

    def ends(self, node: str, phase: str) -> None:
        self._live.stage = self._stages.pop()
        if phase == STEP:
            for optimizer in self._optimizers:
                self._live.label(state_tensors(optimizer), OPTIMIZER)

    def cut(self, leaves: Sequence[Tensor]) -> None:
        for leaf in leaves:
            self._live.label(leaf, FEATURES)
            _after_accumulation(leaf, lambda leaf: self._live.label(leaf.grad, FEATURES))

    def gradient(self, parameter: Tensor) -> None:
        self._live.label(parameter.grad, GRADIENTS)

    def saved(self, tensor: Tensor) -> Tensor:
        self._live.label(tensor, ACTIVATIONS)
        # an operation's own result comes with its graph, which would then keep itself alive
        return tensor.detach()


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state: moments, step counts."""
    return tensors_of([v for state in optimizer.state.values() for v in state.values()], strict=False)


def _after_accumulation(leaf: Tensor, function: Callable[[Tensor], None]) -> Any:
    return leaf.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
