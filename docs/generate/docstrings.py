"""What the arguments of a class mean, read from the ``Args`` of its docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from mtaccum.tasks.base import Task
from mtaccum.tasks.registry import task_class

_SECTION = re.compile(r"^Args:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)


def arguments_of(cls: type) -> dict[str, str]:
    """By name what each argument means, in one line; what a subclass says comes first."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        section = _SECTION.search(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        for names, text in _ARGUMENT.findall(section[1] if section else ""):
            for name in names.split(", "):
                if text.strip() != "as in Task.":  # Task itself says it
                    found.setdefault(name, " ".join(text.replace("``", "`").split()))
    return found


def class_of(values: Any) -> type | None:
    """The class that a section of a config is built into, if it is one of ours."""
    if not isinstance(values, dict):
        return None
    if isinstance(values.get("type"), str):
        known: type[Task] = task_class(values["type"])
        return known
    target = str(values.get("_target_", ""))
    if not target.startswith("mtaccum."):
        return None
    module, _, name = target.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
