"""The optimizer of a config: parameter groups by node, decay or not, learning rate for the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import hydra
from torch import nn
from torch.optim import Optimizer

from mtaccum.config.objects import instantiate
from mtaccum.config.schema import OptimizerConfig, RunConfig
from mtaccum.errors import ConfigError, unknown_name
from mtaccum.model import MultiTaskModel
from mtaccum.parallel import current_ranks
from mtaccum.training import batch_factor


def build_optimizer(config: RunConfig, model: MultiTaskModel) -> Optimizer:
    """An optimizer over all trainable parameters.

    ``optimizer.groups`` gives settings by node (``trunk``, a neck's or task's name) or by a dotted name
    inside one (``trunk.stem``); the longest name that fits a parameter wins. With
    ``decay_norms_and_biases=false``, parameters of at most one dimension get no weight decay.

    Raises:
        ConfigError: a group that fits no parameter, or arguments that the optimizer doesn't take.
    """
    settings = config.optimizer
    factor = batch_factor(
        config.lr_schedule.scale,
        config.batch_size * current_ranks().world_size,
        config.lr_schedule.base_batch_size,
    )
    names = {node_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    for group in settings.groups:
        if not any(_is_in(name, group) for name in names):
            nodes = sorted({name.split(".")[0] for name in names})
            raise ConfigError(unknown_name("node in optimizer.groups:", group, nodes))
    _check_group_settings(settings)
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in names.items():
        fitting = [group for group in settings.groups if _is_in(name, group)]
        decays = settings.decay_norms_and_biases or parameter.dim() > 1
        groups.setdefault((max(fitting, key=len, default=""), decays), []).append(parameter)
    arguments = _scaled(settings.arguments, factor)
    parameters = [
        {
            "params": members,
            **_scaled(settings.groups.get(group, {}), factor),
            **({} if decays else {"weight_decay": 0.0}),
        }
        for (group, decays), members in groups.items()
    ]
    optimizer: Optimizer = instantiate(
        "optimizer", {"_target_": settings.target, "_partial_": True, **arguments}
    )
    try:
        return optimizer(parameters)  # type: ignore[operator,no-any-return]
    except Exception as error:
        raise ConfigError(f"optimizer: can't build {settings.target}: {error}") from error


def _check_group_settings(settings: OptimizerConfig) -> None:
    """PyTorch takes any key in a parameter group, and ignores those it doesn't know."""
    try:
        known = set(inspect.signature(hydra.utils.get_class(settings.target)).parameters) - {"params"}
    except (ValueError, TypeError, ImportError, AttributeError):
        return  # what can't be looked up is reported when it is built
    for group, arguments in settings.groups.items():
        for key, value in arguments.items():
            if key == "lr" and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"optimizer.groups.{group}.lr must be a number, got {value!r}.")
            if key not in known:
                raise ConfigError(unknown_name(f"key in optimizer.groups.{group}:", key, known))


def node_name(parameter: str) -> str:
    """A parameter's name with its node first: ``tasks.seg.head.weight`` is ``seg.head.weight``."""
    return parameter.removeprefix("tasks.").removeprefix("necks.")


def _is_in(name: str, group: str) -> bool:
    return name == group or name.startswith(group + ".")


def _scaled(arguments: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {key: value * factor if key == "lr" else value for key, value in arguments.items()}
