"""Fields of a batch: where a task's target, a mask or a model's inputs lie in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtaccum.errors import BatchError, ConfigError
from mtaccum.structure import describe


@dataclass(frozen=True)
class Path:
    """Keys to follow one after the other, as ``path`` makes them.

    Attributes:
        keys: each a mapping's key, a sequence's index or an object's attribute.
    """

    keys: tuple[str | int, ...]

    def __repr__(self) -> str:
        return f"path({', '.join(map(repr, self.keys))})"


Field = str | int | Path | Callable[[Any], Any]
"""Where a field lies: a key, an index, a path, or a function of the batch."""


def path(*keys: str | int) -> Path:
    """A field inside of another: ``path(1, "seg")`` is ``batch[1]["seg"]``.

    In YAML: ``{path: [1, seg]}``.

    Raises:
        ConfigError: no key, or one that is neither a string nor a whole number.
    """
    if not keys or not all(isinstance(key, str | int) and not isinstance(key, bool) for key in keys):
        raise ConfigError(f"a path is one or more keys and indices, such as path(1, 'seg'); got {keys!r}.")
    return Path(keys)


def check_field(what: str, given: Any, *, several: bool = False) -> None:
    """Refuse what says nothing of where a field lies, or with ``several`` where several do.

    Raises:
        ConfigError: names ``what``, and what is valid.
    """
    fields = given if several and isinstance(given, tuple) else (given,)
    if not all(isinstance(field, str | int | Path) or callable(field) for field in fields):
        raise ConfigError(
            f"{what} must be a key, an index, mtaccum.path(...) or a function of the batch, got {given!r}."
        )


def is_written_path(value: Any) -> bool:
    """Whether a value from a config is a path as YAML has it."""
    return isinstance(value, Mapping) and set(value) == {"path"}


def field_of_config(value: Any) -> Any:
    """A field as a config writes it: ``{path: [1, seg]}`` becomes a path, and a list a tuple of several."""
    if is_written_path(value):
        keys = value["path"]
        return path(*keys) if isinstance(keys, Sequence) and not isinstance(keys, str) else path(keys)
    return tuple(map(field_of_config, value)) if isinstance(value, list) else value


def get_field(batch: Any, field: Field | tuple[Field, ...], default: Any = ...) -> Any:
    """A field of a batch, or a tuple of several.

    Args:
        field: a mapping's key, a sequence's index, an object's attribute, a path of these, or a function; a
            tuple of these for several.
        default: for a batch that has no such field.

    Raises:
        BatchError: there is no such field and no ``default`` was given.
    """
    if isinstance(field, tuple):
        several = [get_field(batch, one, default) for one in field]
        return default if any(one is default for one in several) else tuple(several)
    if callable(field):
        return field(batch)
    value = batch
    try:
        for key in field.keys if isinstance(field, Path) else (field,):
            value = _entry(value, key)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        if default is not ...:
            return default
        if isinstance(batch, Tensor) and isinstance(field, int):
            raise BatchError(
                f"the batch has no entry {field!r}; it is {describe(batch)}. Rows of a tensor are samples: "
                f"put it into a tuple, model((tensor,))."
            ) from error
        raise BatchError(
            f"the batch has no entry {field!r}; it is {describe(batch)}. Name one of its entries: a key, a "
            f"position, an attribute or mtaccum.path(...)."
        ) from error
    return value


def _entry(value: Any, key: str | int) -> Any:
    if isinstance(value, Tensor) and isinstance(key, int):
        raise TypeError("a tensor's rows are samples, and no fields")
    if isinstance(value, Mapping) or isinstance(key, int):
        return value[key]
    if hasattr(value, "keys") and key in list(value.keys()):  # a TensorDict, a table
        return value[key]
    return getattr(value, key)


class Inputs(dict[str, Any]):
    """Several entries of a batch, to be passed as keyword arguments."""


class SeveralInputs(tuple[Any, ...]):
    """Several fields of a batch without names, to be passed one after the other."""


def call(module: Callable[..., Any], features: Any) -> Any:
    """``module(features)``; several inputs are passed as ``module(**features)`` or ``module(*features)``."""
    if isinstance(features, Inputs):
        return module(**features)
    return module(*features) if isinstance(features, SeveralInputs) else module(features)
