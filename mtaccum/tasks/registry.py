"""The registry: names for task classes, so that a config can say ``type: segmentation``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from mtaccum.errors import ConfigError, unknown_name
from mtaccum.tasks.base import Task

ENTRY_POINTS = "mtaccum.tasks"

TaskClass = TypeVar("TaskClass", bound=type[Task])

_classes: dict[str, type[Task]] = {}


def register_task(name: str) -> Callable[[TaskClass], TaskClass]:
    """Class decorator: make a task class known under ``name``.

    Raises:
        ConfigError: another class has that name already, or the decorated object is no Task class.
    """

    def register(cls: TaskClass) -> TaskClass:
        if not (isinstance(cls, type) and issubclass(cls, Task)):
            raise ConfigError(f"register_task({name!r}) needs a subclass of mtaccum.Task, got {cls!r}.")
        known = _classes.get(name)
        if known is not None and _source(known) != _source(cls):
            raise ConfigError(
                f"the task type {name!r} is taken by {_source(known)}, so {_source(cls)} can't have it. "
                f"Choose another name."
            )
        _classes[name] = cls
        return cls

    return register


def _source(cls: type[Task]) -> str:
    """Module and name: equal for a class whose module was loaded twice, as under a reload."""
    return f"{cls.__module__}.{cls.__qualname__}"


def task_class(name: str) -> type[Task]:
    """The task class registered under ``name``, also by an installed package's entry point.

    Raises:
        ConfigError: nobody registered that name (lists the ones there are), or the entry point's
            package can't be imported.
    """
    if name not in _classes:
        for entry in entry_points(group=ENTRY_POINTS):
            if entry.name == name:
                try:
                    cls = entry.load()
                except Exception as error:
                    raise ConfigError(
                        f"the task type {name!r} is announced by the entry point {entry.value!r}, which "
                        f"can't be imported: {error}"
                    ) from error
                if not (isinstance(cls, type) and issubclass(cls, Task)):
                    raise ConfigError(
                        f"the entry point {entry.value!r} of the task type {name!r} leads to {cls!r}, which "
                        f"is no subclass of mtaccum.Task."
                    )
                _classes.setdefault(name, cls)
    if name not in _classes:
        raise ConfigError(
            unknown_name(
                "task type",
                name,
                task_types(),
                "Register a class of your own with @mtaccum.register_task, in a module that "
                "plugins=[...] names.",
            )
        )
    return _classes[name]


def task_types() -> list[str]:
    """All names that ``task_class`` knows, sorted."""
    return sorted({*_classes, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})
