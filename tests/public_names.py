"""The public names of Python: those of ``mtaccum`` with signatures, those of the packages in it without."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import mtaccum

PACKAGES = ("parallel", "memory", "planning", "exactness", "training", "tasks", "model", "data", "engine")
_OURS = mtaccum.__name__
_LINE = 100  # characters from which on a signature is broken up, so that a change of it can be seen
_PLAIN = (bool, int, float, str, type(None))


def collect() -> dict[str, Any]:
    """By module: what is in its ``__all__``."""
    inside = {f"{_OURS}.{name}": importlib.import_module(f"{_OURS}.{name}") for name in PACKAGES}
    return {
        _OURS: {name: describe(getattr(mtaccum, name)) for name in sorted(mtaccum.__all__)},
        **{name: sorted(module.__all__) for name, module in inside.items()},
    }


def describe(value: Any) -> Any:
    """A class by its bases, constructor or fields, and members; a function by its signature; else a type."""
    if inspect.isclass(value):
        return describe_class(value)
    return signature(value) if callable(value) else type(value).__name__


def describe_class(cls: type) -> dict[str, Any]:
    """What a class has of our classes: what it inherits from those of others is theirs."""
    found: dict[str, Any] = {"bases": list(_public_bases(cls))}
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    members = dict(_members_of(cls, {field.name for field in fields}))
    if fields:
        found["fields"] = {field.name: f"{field.type}{_default_of(field)}" for field in fields}
    elif _is_ours(cls.__init__):
        found["constructor"] = signature(cls)
    known = {*members, *(field.name for field in fields)}
    found["attributes"] = sorted(set(_documented_attributes(cls)) - known)
    found["members"] = dict(sorted(members.items()))
    return {key: value for key, value in found.items() if value}


def signature(function: Any, prefix: str = "") -> str | list[str]:
    """Parameters and result as they are written, a long one in several lines; defaults that are functions by
    name."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(
            annotation=_verbatim(parameter.annotation),
            default=_Verbatim(parameter.default.__qualname__)
            if inspect.isroutine(parameter.default)
            else parameter.default,
        )
        for parameter in found.parameters.values()
    ]
    found = found.replace(parameters=parameters, return_annotation=_verbatim(found.return_annotation))
    text = f"{prefix}{found}"
    if len(text) <= _LINE:
        return text
    return [f"{prefix}(", *_lines_of(parameters), str(found.replace(parameters=[]))[1:]]


def _lines_of(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """A line each, with ``/`` and ``*`` where Python has them."""
    before = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in parameters:
        if before is parameter.POSITIONAL_ONLY is not parameter.kind:
            yield "/"
        if parameter.kind is parameter.KEYWORD_ONLY and before < parameter.VAR_POSITIONAL:
            yield "*"
        yield str(parameter)
        before = parameter.kind


def _public_bases(cls: type) -> Iterator[str]:
    """Names of the bases, where one that isn't public is replaced by its own."""
    for base in cls.__bases__:
        if _is_ours(base) and base.__name__ not in mtaccum.__all__:
            yield from _public_bases(base)
        else:
            yield base.__name__


def _members_of(cls: type, fields: set[str]) -> Iterator[tuple[str, Any]]:
    names = {name for base in cls.__mro__ if _is_ours(base) for name in vars(base)}
    for name in names - fields:
        value = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, f"property -> {_result_of(value.fget)}"
        elif isinstance(value, functools.cached_property):
            yield name, f"property -> {_result_of(value.func)}"
        elif isinstance(value, classmethod | staticmethod):
            yield name, signature(value.__func__, f"{type(value).__name__} ")
        elif inspect.isfunction(value):
            yield name, signature(value)
        else:
            yield name, f"= {value!r}" if isinstance(value, _PLAIN) else type(value).__name__


def _documented_attributes(cls: type) -> list[str]:
    """The names under ``Attributes:`` of a docstring, some of which only instances have."""
    section = re.search(r"^Attributes:\n((?: +.*\n?|\n)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    lines = re.findall(r"^    (\w+(?:, \w+)*):", section[1] if section else "", re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is dataclasses.MISSING else " = ..."


def _result_of(function: Any) -> Any:
    return function.__annotations__.get("return")


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == _OURS


class _Verbatim:
    """A text that shows itself without quotes: an annotation as written, or a function's name."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _verbatim(annotation: Any) -> Any:
    return _Verbatim(annotation) if isinstance(annotation, str) else annotation
