"""Tables of the command's options, made from ``conf/`` and from the schema that checks them.

The YAML files hold the defaults and, as comments, what each option means; the schema holds what is valid.
What an option of a task, trunk or data set means is in the docstring of the class that gets it.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from docstrings import arguments_of, class_of
from option_table import markdown
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtaccum.config.schema import ENGINE_KEYS, RunConfig
from mtaccum.engine import StepOptions
from mtaccum.engine.option_values import OneOf

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("engine", "parallel", "optimizer", "lr_schedule", "data", "trunk", "tasks", "experiment")
_TYPED = {"tasks": "'+tasks=[{}]'", "experiment": "+experiment={}"}  # others: group=choice
_NOT_OURS = ("defaults", "hydra")
_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass
class Entry:
    """One option as a YAML file has it: its dotted path, its default as written, and its comment."""

    path: str
    default: str
    comment: list[str] = field(default_factory=list)


def entries(text: str) -> list[Entry]:
    """The options of a YAML file in their order; nested ones by dotted path, sections left out.

    A comment belongs to the option on its line; a line that is nothing but an indented comment goes on with
    the one above.
    """
    root = yaml.compose(text)
    by_line = {} if root is None else dict(_leaves(root, text, ""))
    last: Entry | None = None
    for number, line in enumerate(text.splitlines()):
        last = by_line.get(number, last)
        comment = re.search(r"(?:^|\s)#\s?(.*)$", line)
        continued = line.startswith(" ") and line.lstrip().startswith("#")
        if comment and last is not None and (number in by_line or continued):
            last.comment.append(comment[1].strip())
    return list(by_line.values())


def _leaves(node: Any, text: str, prefix: str) -> Iterator[tuple[int, Entry]]:
    for key, value in node.value:
        if not prefix and key.value in _NOT_OURS:
            continue
        path = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves(value, text, f"{path}.")
        else:
            written = text[value.start_mark.index : value.end_mark.index].strip()
            several = "\n" in written
            yield key.start_mark.line, Entry(path, "..." if several else written or "null")


def description(text: str) -> str:
    """The comment at the head of a YAML file, without Hydra's own line."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def valid(path: str) -> str:
    """What the schema takes for an option, in words; "" for an open part."""
    section: Any = RunConfig
    info: FieldInfo | None = None
    for name in path.split("."):
        if section is StepOptions:
            return _checked(name)
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
        named = {field.alias or key: field for key, field in section.model_fields.items()}
        info = named.get(name)
        if info is None:
            return ""
        section = info.annotation
    return "" if info is None else _words(info.annotation, info)


def _checked(name: str) -> str:
    """What the check of a step option takes: its names, or what its docstring says, in the words of YAML."""
    checks = {option.name: option.metadata["checked"] for option in fields(StepOptions)}
    if name not in ENGINE_KEYS:
        return ""
    check = checks[name]
    if isinstance(check, OneOf):
        return ", ".join(f"`{value}`" for value in check.known)
    said = (inspect.getdoc(check) or "").splitlines()[0].rstrip(".").replace("``", "`")
    for python, written in (("None", "null"), ("True", "true"), ("False", "false")):
        said = re.sub(rf"\b{python}\b", written, said)
    return said[:1].lower() + said[1:]


def _words(annotation: Any, info: FieldInfo | None = None) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inner[0], info)
    if origin in (Union, types.UnionType):
        return ", or ".join(_words(one, info) for one in inner)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list of {_words(inner[0])}".replace("list of list", "list of lists")
    if origin is dict:
        return "dict"
    return _NAMES.get(annotation, "") + (_bounds(info) if annotation in (int, float) else "")


def _bounds(info: FieldInfo | None) -> str:
    metadata = [] if info is None else info.metadata
    words = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in metadata
        for name, sign in _SIGNS.items()
        if getattr(constraint, name, None) is not None
    ]
    return f" {', '.join(words)}" if words else ""


def table(text: str, prefix: str = "", without: str | None = None) -> str:
    """A Markdown table of the options of a YAML file; "" if it has none.

    Args:
        without: leave out options with this default, which the choice of the file itself sets.
    """
    found = [entry for entry in entries(text) if entry.default != without]
    values = yaml.safe_load(text)
    rows = []
    for entry in found:
        above, _, name = entry.path.rpartition(".")
        cls = class_of(values.get(above) if above else values)
        said = "" if cls is None else arguments_of(cls).get(name, "")
        path = f"{prefix}{entry.path}"
        meaning = said or " ".join(entry.comment)
        rows.append([f"`{path}`", f"`{entry.default}`", valid(path), literal(meaning)])
    return markdown([["option", "default", "valid", "meaning"], ["---"] * 4, *rows]) if rows else ""


def literal(text: str) -> str:
    """Text whose underscores and stars Markdown shall leave alone, but for what is code already."""
    pieces = text.split("`")
    return "`".join(
        piece if index % 2 else re.sub(r"([_*<])", r"\\\1", piece) for index, piece in enumerate(pieces)
    )


def configuration() -> str:
    """The options that every run has, those of ``conf/train.yaml``."""
    return table((CONF / "train.yaml").read_text(encoding="utf-8"))


def groups() -> str:
    """A section for each group of configs: what there is to choose, and the options of each choice.

    What the choices of a group share stands once, as in its ``_defaults.yaml``.
    """
    return "\n\n".join(part for name in GROUPS for part in _group(CONF / name) if part)


def _group(folder: Path) -> Iterator[str]:
    name = folder.name
    yield f"### {name}"
    shared = folder / "_defaults.yaml"
    if shared.is_file():
        yield table(shared.read_text(encoding="utf-8"), f"{name}.")
    for path in sorted(folder.glob("[!_]*.yaml")):
        text, choice = path.read_text(encoding="utf-8"), path.stem
        said = description(text)
        typed = _TYPED.get(name, name + "={}").format(choice)
        yield f"`{typed}`{': ' if said else ''}{said}"
        inside = "" if "# @package _global_" in text else f"{name}."
        if name in _TYPED:
            yield table(text, f"tasks.{choice}." if name == "tasks" else inside)
        else:
            yield table(text, inside, without=choice)
