"""What the README promises: names that its snippets use, and what it sets in backticks.

A name of Python is one that code imports from ``mtaccum``, reads of it (``mtaccum.memory.measure_step``) or
of a public class (``Task.draw``), or passes to a public callable (``Engine(chunks=)``). All other words in
backticks must be ours too (an argument, a config key or option, an extra) or stand in ``OTHERS``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mtaccum
from mtaccum.tasks import MODES, task_types

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# words in backticks that are not ours
OTHERS = {
    *("DistributedDataParallel", "ValueError", "gradient_accumulation_steps", "training_step"),
    *("grad", "parameter.grad"),
}
VARIABLES = {
    "engine": "Engine",
    "model": "MultiTaskModel",
    "result": "StepResult",
}  # as the README calls them
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"\.?([A-Za-z_]+(?:\.[a-z_]+)*)(?:=(\w+))?")
_FILE = re.compile(r".*\.(json|jsonl|pt|py|yaml)")

Config = Mapping[str, Any]


def collect(names: Mapping[str, Any], config: Config, text: str | None = None) -> list[str]:
    """The names of Python that the README mentions.

    Raises:
        AssertionError: lists those, and the other words, that don't exist.
    """
    text = README.read_text(encoding="utf-8") if text is None else text
    code = [block for language, block in _BLOCK.findall(text) if language == "python"]
    spans = re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))
    mentioned = {name for piece in (*code, *spans) for name in names_of(piece)}
    mentioned |= set(re.findall(r"python -m (mtaccum\.\w+)", text))
    wrong = [name for name in mentioned if not exists(name)]
    wrong += [word for span in spans for word in words_of(span) if not _is_word(word, names, config)]
    assert not wrong, (
        f"{README.name} mentions what doesn't exist: {', '.join(sorted(set(wrong)))}. Words that aren't ours "
        f"stand in OTHERS of tests/{Path(__file__).name}."
    )
    return sorted(mentioned)


def names_of(code: str) -> Iterator[str]:
    """The names of ours that a piece of code uses; none if it is no code."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mtaccum":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] == "mtaccum")
        elif isinstance(node, ast.Attribute) and (name := _full_name(node)):
            yield name
        elif isinstance(node, ast.Call) and (name := _full_name(node.func)):
            yield from (f"{name}({keyword.arg}=)" for keyword in node.keywords if keyword.arg)


def _full_name(node: ast.expr) -> str | None:
    """``mtaccum.Task.draw`` for ``mtaccum.Task.draw`` and ``Task.draw``; None for what isn't ours."""
    dotted = ast.unparse(node)
    first = dotted.partition(".")[0]
    if not re.fullmatch(r"\w+(\.\w+)*", dotted):
        return None
    return dotted if first == "mtaccum" else f"mtaccum.{dotted}" if first in mtaccum.__all__ else None


def exists(name: str) -> bool:
    """Whether there is such a module, name in a module, attribute, or parameter (``Engine(chunks=)``)."""
    dotted, _, keyword = name.partition("(")
    value: Any = mtaccum
    path = "mtaccum"
    for part in dotted.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        value = getattr(value, part)
    parameters = inspect.signature(value).parameters if keyword else {}
    return not keyword or keyword.removesuffix("=)") in parameters


def words_of(span: str) -> Iterator[str]:
    """The words of a piece in backticks: itself, or each where all are options (``a=1 b.c=2``)."""
    parts = span.split()
    if all(_WORD.fullmatch(part) for part in parts) and (len(parts) == 1 or all("=" in p for p in parts)):
        yield from parts


def _is_word(word: str, names: Mapping[str, Any], config: Config) -> bool:
    """Whether a word is one of ours, or known to be another's."""
    match = _WORD.fullmatch(word)
    assert match is not None
    name, value = match.groups()
    first, _, rest = name.partition(".")
    if name in OTHERS or _FILE.fullmatch(name):
        return True
    if rest and first not in {*config["keys"], *VARIABLES}:  # something of others, such as torch.compile
        return True
    keys = {*config["keys"], *(k for group in config["options"].values() for o in group.values() for k in o)}
    if value is not None and name in config["options"]:
        return value in {*config["options"][name], *config["choices"].get(name, ())}
    if value is not None and name in config["choices"]:
        return value in config["choices"][name]
    if first in VARIABLES and rest in _parts_of(names["mtaccum"][VARIABLES[first]]):
        return True
    last = {key.rpartition(".")[2] for key in keys}
    return name in keys or (not rest and name in {*last, *_vocabulary(names, config)})


def _vocabulary(names: Mapping[str, Any], config: Config) -> Iterable[str]:
    """All words without a dot that are ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from (*MODES, *task_types(), *project["optional-dependencies"], *config["options"])
    yield from (option for options in config["options"].values() for option in options)
    yield from (str(value) for values in config["choices"].values() for value in values)
    for name, described in names["mtaccum"].items():
        yield name
        yield from _parts_of(described)


def _parts_of(described: Any) -> set[str]:
    """Parameters, fields, members and attributes of what ``public_names`` has described."""
    if not isinstance(described, dict):
        return set(re.findall(r"(\w+): ", str(described)))
    found = {*described.get("members", ()), *described.get("fields", ()), *described.get("attributes", ())}
    return found | _parts_of(described.get("constructor", ""))
