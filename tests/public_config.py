"""The public part of the configuration: dotted keys, config groups with their options, and closed choices."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import hydra
from omegaconf import OmegaConf

from mtaccum import StepOptions
from mtaccum.config import RunConfig, config_dir, group_options
from mtaccum.config.schema import ENGINE_KEYS
from mtaccum.engine.option_values import OneOf

_ADDED = ("experiment", "tasks")  # groups of which the default config has no option


def collect() -> dict[str, Any]:
    """The keys of the config that a training starts from; by group and option the keys that it adds; and of
    keys with a closed choice what there is to choose."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        keys = _composed()
        groups = sorted(path.name for path in config_dir().iterdir() if path.is_dir())
        options = {
            group: {option: sorted(_with_option(group, option) - keys) for option in group_options(group)}
            for group in groups
        }
    return {"keys": sorted(keys), "options": options, "choices": dict(sorted(_choices(RunConfig)))}


def _with_option(group: str, option: str) -> set[str]:
    return _composed(f"{'+' * (group in _ADDED)}{group}={option}")


def _composed(*overrides: str) -> set[str]:
    values: Any = OmegaConf.to_container(hydra.compose("train", [*overrides]), resolve=False)
    return set(_dotted(values))


def _dotted(values: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{above}{key}.")


def _choices(section: Any, above: str = "") -> Iterator[tuple[str, list[str]]]:
    for name, field in section.model_fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            yield f"{above}{name}", [*typing.get_args(field.annotation)]
        elif field.annotation is StepOptions:
            for option in dataclasses.fields(StepOptions):
                checked = option.metadata["checked"]
                if isinstance(checked, OneOf) and option.name in ENGINE_KEYS:
                    yield f"{above}{name}.{option.name}", [*checked.known]
        elif hasattr(field.annotation, "model_fields"):
            yield from _choices(field.annotation, f"{above}{name}.")
