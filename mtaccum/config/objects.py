"""Objects from configuration: open parts name their class in ``_target_``, tasks their ``type``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import hydra
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import default_collate

from mtaccum.batch import field_of_config, is_written_path
from mtaccum.config.schema import RunConfig
from mtaccum.data import batch_errors
from mtaccum.errors import ConfigError, TaskError, unknown_name
from mtaccum.model import TRUNK, MultiTaskModel, Neck, evaluating
from mtaccum.structure import describe, tensors_of
from mtaccum.tasks import Task, task_class, task_types


def instantiate(place: str, config: Mapping[str, Any], **arguments: Any) -> Any:
    """The object that ``config["_target_"]`` names, built with the other entries.

    Raises:
        ConfigError: there is no ``_target_``, it can't be found, or its construction failed.
    """
    if "_target_" not in config:
        raise ConfigError(f"{place} needs a _target_: the class to build, as package.module.Class.")
    _check_keys(place, config)
    try:
        # plain containers go in, so that no DictConfig gets into the objects
        return hydra.utils.instantiate(OmegaConf.create(dict(config)), **arguments, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{place}: {cause}") from error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise ConfigError(f"{place}: can't build {config['_target_']}: {reason}") from error


def _check_keys(place: str, config: Mapping[str, Any]) -> None:
    """Refuse keys that the target's signature doesn't have, with the nearest one that it has."""
    target = str(config["_target_"])
    try:
        known = inspect.signature(hydra.utils.get_object(target)).parameters
    except Exception:
        return  # what can't be found or has no signature is reported when it is built
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for key in config:
        if not key.startswith("_") and key not in known:
            hint = (
                f"{target} doesn't take it. What a shipped option holds stays where only _target_ is "
                f"changed; to replace the whole: '~{place}' '+{place}={{_target_: {target}}}'."
            )
            raise ConfigError(unknown_name(f"key in {place}:", key, known, hint))


def build_model(config: RunConfig, batch: Any = None) -> tuple[MultiTaskModel, RunConfig]:
    """The model of a config, and the config with each ``in_channels`` filled in.

    Args:
        batch: a few samples, on which the nodes are run to find out their channels and whether each head
            fits its features. None: don't; then every ``in_channels`` must be given.

    Raises:
        ConfigError: a part that can't be built, or a head that doesn't fit its features (names both).
    """
    necks = {name: _neck(name, neck) for name, neck in config.necks.items()}
    trunk = None if config.trunk is None else instantiate("trunk", config.trunk)
    inputs = field_of_config(config.data.inputs)
    tasks = config.tasks
    if batch is not None:
        features = _features(trunk, necks, inputs, batch)
        tasks = {name: _with_channels(name, task, features) for name, task in tasks.items()}
    built = {name: _task(name, task) for name, task in tasks.items()}
    model = MultiTaskModel(trunk, built, inputs=inputs, necks=necks)
    if batch is not None:
        _outputs(model, batch)
    return model, config.model_copy(update={"tasks": tasks})


def _features(trunk: nn.Module | None, necks: Mapping[str, Neck], inputs: Any, batch: Any) -> dict[str, Any]:
    """What each node hands on, found by a model with a task on every node that returns its features."""
    probes = {f"probe_{node}": _Probe(node) for node in (TRUNK, *necks)}
    outputs = _outputs(MultiTaskModel(trunk, probes, inputs=inputs, necks=necks), batch)
    return {name.removeprefix("probe_"): output for name, output in outputs.items()}


def collate(config: RunConfig, samples: list[Any]) -> Any:
    """A batch of samples, by the config's ``collate_fn`` or PyTorch's default."""
    function = config.data.collate_fn
    collate_fn = default_collate if function is None else collate_function(function)
    with batch_errors():
        return collate_fn(samples)


def collate_function(target: Any) -> Any:
    """The function that ``data.collate_fn`` names: a dotted path, or a ``_target_`` that builds one."""
    if isinstance(target, Mapping):
        return instantiate("data.collate_fn", target)
    try:
        return hydra.utils.get_method(str(target))
    except Exception as error:
        raise ConfigError(f"data.collate_fn: can't find {target!r}: {error}") from error


class _Probe(Task):
    """Its prediction is the features it gets."""

    def __init__(self, on: str) -> None:
        super().__init__(nn.Identity(), target=None, on=on)

    def forward(self, features: Any, batch: Any) -> Any:
        return features


def _outputs(model: MultiTaskModel, batch: Any) -> dict[str, Any]:
    """All predictions for a batch, leaving buffers, modes and random state as they were."""
    try:
        with evaluating(model), torch.random.fork_rng(devices=[]):
            return model(batch)  # type: ignore[no-any-return]
    except TaskError as error:
        raise ConfigError(str(error)) from error


def _neck(name: str, config: Mapping[str, Any]) -> Neck:
    arguments = dict(config)
    on = arguments.pop("on", TRUNK)
    return Neck(instantiate(f"necks.{name}", arguments), on if isinstance(on, str) else tuple(on))


def _class_of(name: str, config: Mapping[str, Any]) -> tuple[type[Task], Mapping[str, inspect.Parameter]]:
    if "type" not in config:
        raise ConfigError(
            f"tasks.{name} needs a type, the name of a task class: one of {', '.join(task_types())}. If "
            f"it is one that ships, choose it: '+tasks=[...,{name}]'."
        )
    cls = task_class(config["type"])
    return cls, inspect.signature(cls).parameters


def _with_channels(name: str, config: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """A task's config with ``in_channels`` from the node it is on, if its class takes one and has none."""
    _, known = _class_of(name, config)
    given = config.get("in_channels") is not None or config.get("head") is not None
    if "in_channels" not in known or given:
        return dict(config)
    on = config.get("on", TRUNK)
    nodes = [on] if isinstance(on, str) else list(on)
    if unknown := [node for node in nodes if node not in features]:
        raise ConfigError(unknown_name(f"node in tasks.{name}.on:", unknown[0], features))
    tensors: list[Tensor] = tensors_of([features[node] for node in nodes])
    if len(tensors) != 1 or tensors[0].dim() < 2:
        shapes = ", ".join(f"{node}: {describe(features[node])}" for node in nodes)
        raise ConfigError(
            f"tasks.{name}.in_channels can't be filled in from features {shapes}: that takes a single tensor "
            f"(batch, channels, ...). Set it, or give a head of your own."
        )
    return {**config, "in_channels": int(tensors[0].shape[1])}


def _task(name: str, config: Mapping[str, Any]) -> Task:
    cls, known = _class_of(name, config)
    arguments = {key: value for key, value in config.items() if key != "type"}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for key in arguments:
            if key not in known:
                raise ConfigError(unknown_name(f"key in tasks.{name}:", key, ["type", *known]))
    for key, value in arguments.items():
        if isinstance(value, Mapping) and "_target_" in value:
            arguments[key] = instantiate(f"tasks.{name}.{key}", value)
        elif is_written_path(value) or key == "target":
            arguments[key] = field_of_config(value)
    if isinstance(arguments.get("on"), list):
        arguments["on"] = tuple(arguments["on"])
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tasks.{name}: {error}") from error
