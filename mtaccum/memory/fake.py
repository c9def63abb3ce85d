"""Fake tensors: models, batches and optimizers that have shapes and sizes, and no values and no memory.

PyTorch's ``FakeTensorMode`` runs any code on them. A model is built on the device ``meta``, and its tensors
are replaced afterwards, since some constructors read values, which fake tensors don't have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from mtaccum.structure import map_tensors

M = TypeVar("M", bound=nn.Module)


def build_empty(build: Callable[[], M]) -> M:
    """What ``build`` returns, on the device ``meta``; or for real where its code can't do without values."""
    random = torch.get_rng_state()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # initialisations of tensors without values
            return build()
    except Exception:
        torch.set_rng_state(random)
        return build()
    finally:
        torch.set_rng_state(random)


def as_fake(tensor: Tensor) -> Tensor:
    """A tensor like this one, on the CPU; to be called inside of a FakeTensorMode."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"a tensor of layout {tensor.layout} can't be predicted")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all tensors of a model by fake ones on the CPU; what was shared is shared again."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, as_fake(tensor))
        return made[id(tensor)][1]

    parameters: dict[int, tuple[Tensor, nn.Parameter]] = {}
    with mode:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in parameters:
                        new = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                        parameters[id(parameter)] = (parameter, new)
                    module._parameters[name] = parameters[id(parameter)][1]
            for places in (module._buffers, vars(module)):
                for name, value in places.items():
                    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                        places[name] = fake(value)


def fake_nest(nest: Any, mode: FakeTensorMode) -> Any:
    """A batch, or any nest of tensors, of the same shapes."""
    with mode:
        return map_tensors(nest, as_fake, strict=False)


def make_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """The state that an optimizer has after its first step, by a step with gradients of no values."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in learning:
        parameter.grad = None
