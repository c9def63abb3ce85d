"""Sharding: parameters, gradients and optimizer state of each node become DTensors, by ``fully_shard``.

It is done once, before the optimizer is made. How such a model is trained stands in ``fsdp``.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

from mtaccum.errors import ConfigError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.collectives import Collectives, current_ranks
from mtaccum.parallel.dtensor import full_tensor
from mtaccum.parallel.tracking import GradientTracking
from mtaccum.structure import tensors_of

_SKELETON = "_without_memory"


def shard(model: MultiTaskModel, ranks: Collectives | None = None) -> None:
    """Shard each node's parameters over the ranks, with the values that rank 0 has.

    To be called on all ranks, once the model is on its device and before its optimizer is made. On one rank
    it does nothing. State dicts keep their names.

    Args:
        ranks: None: those of PyTorch's default process group.

    Raises:
        ConfigError: nodes that share parameters, tasks of mode ``frozen``, or modules without a forward.
    """
    ranks = current_ranks() if ranks is None else ranks
    if ranks.world_size == 1 or is_sharded(model):
        return
    # imported where it is needed: it takes half as long as PyTorch itself
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _check(model)
    ranks.broadcast_tensors(model)
    vars(model)[_SKELETON] = [_skeleton_of(model)]  # in a list, or it would be a part of the model
    mesh = init_device_mesh(model.device.type, (ranks.world_size,))
    for name, module in model.own_modules().items():
        if next(module.parameters(), None) is not None:
            try:
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
            except ValueError as error:
                raise ConfigError(f"parallel=fsdp can't shard the module of {name!r}: {error}") from error
            GradientTracking(module)
            module.register_forward_hook(_check_result)


def _check_result(module: nn.Module, _: Any, result: Any) -> None:
    """Refuse results whose memory has gone with the gathered parameters."""
    tensors = [t for t in tensors_of(result, strict=False) if t.layout == torch.strided and t.numel()]
    if any(t.untyped_storage().nbytes() == 0 for t in tensors):
        raise ConfigError(
            "under parallel=fsdp a module can't return its own parameter, whose memory goes after each pass. "
            "Return parameter.clone()."
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's nodes were sharded."""
    return any(map(_is_sharded, model.modules()))


def sharded_nodes(model: MultiTaskModel) -> dict[str, Any]:
    """The modules of the nodes that were sharded, by the node's name."""
    return {name: module for name, module in model.own_modules().items() if _is_sharded(module)}


def _is_sharded(module: nn.Module) -> bool:
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def unsharded(model: MultiTaskModel) -> MultiTaskModel:
    """A model with all parameters on this rank, whose forwards need no other rank: to evaluate, draw or
    export as each rank likes. Nothing learned by it reaches the original. To be called on all ranks.

    Returns:
        The model itself if it isn't sharded; otherwise a copy.
    """
    if not is_sharded(model):
        return model
    skeleton: MultiTaskModel = vars(model)[_SKELETON][0]
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    memo: dict[int, Any] = {}
    for name, parameter in skeleton.named_parameters():
        memo[id(parameter)] = nn.Parameter(full_tensor(given[name].detach()), requires_grad=False)
    for name, buffer in skeleton.named_buffers():
        memo[id(buffer)] = given[name].clone()
    copied = copy.deepcopy(skeleton, memo)
    copied.train(model.training)
    for name, task in model.tasks_by_name().items():
        copied.task(name).weight, copied.task(name).mode = task.weight, task.mode
    return copied


def _skeleton_of(model: MultiTaskModel) -> MultiTaskModel:
    """A copy of a model without the memory of its parameters and buffers."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _check(model: MultiTaskModel) -> None:
    owners: dict[int, str] = {}
    for name, module in model.own_modules().items():
        for parameter in set(module.parameters()):
            if (other := owners.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"parallel=fsdp can't shard parameters that nodes share, and {other!r} and {name!r} do. "
                    f"Use parallel=ddp."
                )
    check_modes(model)


def check_modes(model: MultiTaskModel) -> None:
    """Refuse heads that are frozen while their trunk learns; it may be asked for between steps."""
    if frozen := [name for name, task in model.tasks_by_name().items() if task.mode == "frozen"]:
        raise ConfigError(
            f"parallel=fsdp can't freeze a head while its trunk learns, as mode=frozen of {frozen[0]!r} "
            f"asks. Use parallel=ddp, or requires_grad_(False) on the head's parameters."
        )
