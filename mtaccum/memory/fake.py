"""Fake tensors: models, batches and optimizers that have shapes and sizes, and no values and no memory.

PyTorch's ``FakeTensorMode`` runs any code on them. A model is built on the device ``meta``, and its tensors
are replaced afterwards, since some constructors read values, which fake tensors don't have.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mtaccum.errors import PredictionError, first_line
from mtaccum.state import random_state_kept
from mtaccum.structure import map_tensors, tensors_of
from mtaccum.torch_internals import FakeTensorMode, address_of, buffers_of, parameters_of

M = TypeVar("M", bound=nn.Module)


def build_empty(build: Callable[[], M]) -> M:
    """What ``build`` returns, on the device ``meta``; or for real where its code can't do without values."""
    try:
        # initialisations of tensors without values warn
        with random_state_kept(), torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return build()
    except Exception:
        with random_state_kept():
            return build()


class Faking:
    """Makes fake tensors on the CPU like given ones, inside of a FakeTensorMode. What shares memory does so
    again, and views of something larger keep all of it."""

    def __init__(self) -> None:
        # with the real one, whose address must stay taken
        self._made: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            raise PredictionError(
                f"the memory of a tensor of layout {tensor.layout} can't be predicted. Measure it: "
                f"mtaccum.memory.measure_step."
            )
        real = tensor.untyped_storage()
        if address_of(real) not in self._made:
            made = torch.empty(real.nbytes(), dtype=torch.uint8).untyped_storage()
            self._made[address_of(real)] = real, made
        fake = torch.empty(0, dtype=tensor.dtype)
        _, storage = self._made[address_of(real)]
        fake.set_(storage, int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return fake.requires_grad_(tensor.requires_grad)


def make_fake(model: M, mode: FakeTensorMode) -> M:
    """A model whose tensors are fake ones on the CPU, also those in lists and dicts that its modules have;
    what was shared is shared again. Of a model on the device ``meta`` they are replaced; one with real
    parameters may be somebody's own, so it is copied, without its memory."""
    made: dict[int, Any] = {}
    originals: list[Tensor] = []  # whose ids must stay taken
    faking = Faking()

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = faking(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            originals.append(tensor)
            made[id(tensor)] = new
        return cast(Tensor, made[id(tensor)])

    held: list[Tensor] = [*model.parameters()] or [*model.buffers()]
    in_place = all(tensor.is_meta for tensor in held)
    with mode:
        for module in model.modules():
            for places in (parameters_of(module), buffers_of(module), vars(module)):
                for name, value in places.items():
                    if name not in _OWN and tensors_of(value, strict=False):
                        faked = map_tensors(value, fake, strict=False)
                        if in_place:
                            places[name] = faked
    if in_place:
        return model
    try:
        return copy.deepcopy(model, made)
    except Exception as error:
        raise PredictionError(
            f"a model with real parameters is copied to be predicted, without its memory, and this one can't "
            f"be: {first_line(error)}. Measure it: mtaccum.memory.measure_step."
        ) from error


_OWN = frozenset(vars(nn.Module()))  # where a module keeps its children and hooks


def fake_nest(nest: Any, mode: FakeTensorMode) -> Any:
    """A batch, or any nest of tensors, of the same shapes."""
    with mode:
        return map_tensors(nest, Faking(), strict=False)


def make_state(optimizer: Optimizer, learning: Iterable[nn.Parameter]) -> None:
    """The state that an optimizer has after its first step, by a step with gradients of no values; those that
    are there already stay what they are."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in learning:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in held:
        parameter.grad = None
