"""Values of options: each function checks one kind of value, and returns it in its lasting form."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtaccum.errors import ConfigError, unknown_name
from mtaccum.values import real_number, whole_number


class FrozenDict(dict[str, Any]):
    """A dict that stays as it is, so that it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((key, repr(value)) for key, value in self.items())))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("options of a step are frozen; make new ones: options.changed({...})")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)


@dataclass(frozen=True)
class OneOf:
    """A name among some.

    Attributes:
        known: all there are.
    """

    known: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.known:
            raise ConfigError(unknown_name(name, value, self.known))
        return value


def positive_or_none(name: str, value: Any) -> Any:
    """A finite number above 0, or None."""
    if value is None:
        return None
    number = real_number(value)
    if number is None or not 0 < number < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}.")
    return number


def at_least_one(name: str, value: Any) -> int:
    """A whole number from 1 on."""
    number = whole_number(value)
    if number is None or number < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return number


def true_or_false(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return value


def module_names(name: str, value: Any) -> tuple[str, ...]:
    """A list of names of modules, or of patterns for them."""
    valid = not isinstance(value, str) and isinstance(value, Collection | Iterator)
    names = tuple(value) if valid else ()
    if not valid or not all(isinstance(item, str) for item in names):
        raise ConfigError(f"{name} must be a list of names of modules, got {value!r}.")
    return names


def compile_options(name: str, value: Any) -> Any:
    """True, False, or options of ``torch.compile``."""
    if not isinstance(value, bool | Mapping):
        raise ConfigError(f"{name} must be True, False or a dict of options, got {value!r}.")
    return value if isinstance(value, bool) else FrozenDict(value)


def head_groups(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Lists of two tasks or more, each task in one of them at most."""
    valid = isinstance(value, Sequence) and not isinstance(value, str)
    if not valid or not all(
        isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
        for names in value
    ):
        raise ConfigError(
            f"{name} must be a list of lists of task names, such as [[cls, number]], got {value!r}."
        )
    seen: set[str] = set()
    for group in value:
        if len(group) < 2:
            raise ConfigError(f"{name}: {list(group)} is no head group; it takes two tasks or more.")
        for task in group:
            if task in seen:
                raise ConfigError(f"{name}: {task!r} stands in them twice; a task is in one head group.")
            seen.add(task)
    return tuple(map(tuple, value))


def chunk_numbers(name: str, value: Any) -> FrozenDict:
    """Numbers of chunks by task; None is no task."""
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a dict of numbers by task, such as {{seg: 4}}, got {value!r}.")
    return FrozenDict({task: at_least_one(f"{name}.{task}", number) for task, number in value.items()})
