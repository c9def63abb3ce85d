"""FSDP: parameters, gradients and optimizer state of each node are spread over the ranks.

PyTorch's FSDP2 (``fully_shard``) gathers a node's parameters for each of its passes, so every rank has to run
every pass that any rank runs, in one order. Where a rank has nothing to learn, its pass changes nothing.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.errors import ConfigError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.ranks import Ranks, current_ranks
from mtaccum.parallel.reached import Reached
from mtaccum.structure import tensors_of

_SKELETON = "_without_memory"


def shard(model: MultiTaskModel, ranks: Ranks | None = None) -> None:
    """Spread each node's parameters over the ranks, with the values that rank 0 has.

    To be called on all ranks, once the model is on its device and before its optimizer is made. On one rank
    it does nothing. State dicts keep their names.

    Args:
        ranks: None: those of PyTorch's default process group.

    Raises:
        ConfigError: nodes that share parameters, tasks of mode ``frozen``, or modules without a forward.
    """
    ranks = current_ranks() if ranks is None else ranks
    if ranks.size == 1 or is_sharded(model):
        return
    # imported where it is needed: it takes half as long as PyTorch itself
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _check(model)
    ranks.share(model)
    vars(model)[_SKELETON] = [_skeleton_of(model)]  # in a list, or it would be a part of the model
    mesh = init_device_mesh(model.device.type, (ranks.size,))
    for name, module in model.own_modules().items():
        if next(module.parameters(), None) is not None:
            try:
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
            except ValueError as error:
                raise ConfigError(f"parallel=fsdp can't spread the module of {name!r}: {error}") from error
            Reached(module)
            module.register_forward_hook(_check_own)


def _check_own(module: nn.Module, _: Any, result: Any) -> None:
    """Refuse results whose memory has gone with the gathered parameters."""
    tensors = [t for t in tensors_of(result, strict=False) if t.layout == torch.strided and t.numel()]
    if any(t.untyped_storage().nbytes() == 0 for t in tensors):
        raise ConfigError(
            "under parallel=fsdp a module can't return its own parameter, whose memory goes after each pass. "
            "Return parameter.clone()."
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's nodes were spread over the ranks."""
    return any(map(_is_sharded, model.modules()))


def nodes_of(model: MultiTaskModel) -> dict[str, Any]:
    """The nodes that are spread, by name."""
    return {name: module for name, module in model.own_modules().items() if _is_sharded(module)}


def is_spread(tensor: Tensor | None) -> bool:
    """Whether each rank has a part of a tensor only."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def _is_sharded(module: nn.Module) -> bool:
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def gathered(model: MultiTaskModel) -> MultiTaskModel:
    """A model with all parameters on this rank, whose forwards need no other rank: to evaluate, draw or
    export as each rank likes. Nothing learned by it reaches the original. To be called on all ranks.

    Returns:
        The model itself if it isn't spread over the ranks; otherwise a copy.
    """
    if not is_sharded(model):
        return model
    skeleton: MultiTaskModel = vars(model)[_SKELETON][0]
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    memo: dict[int, Any] = {}
    for name, parameter in skeleton.named_parameters():
        memo[id(parameter)] = nn.Parameter(whole(given[name].detach()), requires_grad=False)
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread; the tensor itself if it isn't."""
    part: Any = tensor
    part = part.to_local() if is_spread(tensor) else part
    result: Tensor = part
    return result


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is spread, on every rank (to be called on all); the tensor itself if it isn't."""
    full: Any = tensor
    full = full.full_tensor() if is_spread(tensor) else full
    result: Tensor = full
    return result


def spread_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor spread as another one is; itself if that isn't."""
    if not is_spread(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def _check(model: MultiTaskModel) -> None:
    owners: dict[int, str] = {}
    for name, module in model.own_modules().items():
        for parameter in set(module.parameters()):
            if (other := owners.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"parallel=fsdp can't spread parameters that nodes share, and {other!r} and {name!r} do. "
                    f"Use parallel=ddp."
                )
    check_modes(model)


def check_modes(model: MultiTaskModel) -> None:
    """Refuse heads that are frozen while their trunk learns; it may be asked for between steps.

    Raises:
        ConfigError: names the first one.
    """
    if frozen := [name for name, task in model.tasks_by_name().items() if task.mode == "frozen"]:
        raise ConfigError(
            f"parallel=fsdp can't freeze a head while its trunk learns, as mode=frozen of {frozen[0]!r} "
            f"asks. Use parallel=ddp, or requires_grad_(False) on the head's parameters."
        )
