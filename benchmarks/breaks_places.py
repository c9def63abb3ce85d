"""Where a break is: recorded so that its place is found again after files have moved and words have changed.

A place is a function and a statement in it, as ``ast.unparse`` writes it: how the source is wrapped or
commented doesn't matter. Of a compound statement only the header counts, as ``if x:`` without what is below.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from breaks_operators import Edit, broken, changes, edits

# Operators whose breaks mostly fail at once, and so tell little, are drawn less often.
_CHANCES = {"arguments swapped": 0.2, "returned value": 0.5}
_LONG_ENOUGH = 20  # characters of a statement that is looked for in functions of another name


@dataclass(frozen=True)
class Break:
    """A break of one line and the test that noticed it.

    Attributes:
        id: the part of the package it was drawn from, and its number.
        function: as classes and functions are nested, ``Engine.step``; empty: none.
        line, broken_line: what a reader of the file sees, before and after.
        statement, broken_statement: what is looked for, and what is put in its place.
        occurrence: which of the same statements in the function, from 0 on.
        noticed_by: the first test that failed; None: those in the files ``tried`` passed.
        equivalent: why no test can notice it, where a reader found so.
    """

    id: str
    file: str
    function: str
    operator: str
    line: str
    broken_line: str
    statement: str
    broken_statement: str
    occurrence: int = 0
    noticed_by: str | None = None
    tried: list[str] = field(default_factory=list)
    equivalent: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a record: without what says nothing."""
        kept = {name: value for name, value in asdict(self).items() if value not in (None, [], 0)}
        return kept | {"noticed_by": self.noticed_by}


class Place(NamedTuple):
    """A statement's header: lines from ``start`` up to and without ``stop``, counted from 0."""

    start: int
    stop: int
    statement: str
    function: str
    body: tuple[int, int]  # lines that run when the function is called; of the file's level: none


@cache
def places(source: str) -> list[Place]:
    """All statements of a file."""
    found: list[Place] = []

    def visit(node: ast.AST, function: tuple[str, ...], body: tuple[int, int]) -> None:
        for child in ast.iter_child_nodes(node):
            inner, lines = function, body
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*function, child.name)
                if not isinstance(child, ast.ClassDef):
                    lines = (child.body[0].lineno - 1, child.end_lineno or child.lineno)
            if isinstance(child, ast.stmt):
                found.append(_place(child, ".".join(inner), lines))
            visit(child, inner, lines)

    visit(ast.parse(source), (), (0, 0))
    return found


def _place(node: ast.stmt, function: str, body: tuple[int, int]) -> Place:
    below = getattr(node, "body", None)
    stop = node.end_lineno or node.lineno
    if isinstance(below, list):
        first = below[0]
        stop = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))]) - 1
    return Place(node.lineno - 1, stop, header(node), function, body)


def header(node: ast.stmt) -> str:
    """A statement without the statements in it and without decorators."""
    emptied = {"body": [ast.Expr(ast.Constant(...))], "orelse": [], "finalbody": [], "decorator_list": []}
    if not isinstance(getattr(node, "body", None), list):
        return ast.unparse(node)
    fields = {name: emptied.get(name, value) for name, value in ast.iter_fields(node)}
    text = ast.unparse(ast.fix_missing_locations(type(node)(**fields)))
    return text.removesuffix("...").rstrip()


def draw(package: Path, part: str, number: int, seed: int) -> list[Break]:
    """So many breaks of a part of a package, each on a line of its own; all lines are equally likely."""
    choices: dict[tuple[Path, int], list[Edit]] = {}
    for path in sorted((package / part).rglob("*.py")):
        for edit in edits(path.read_text(encoding="utf-8")):
            choices.setdefault((path, edit.line), []).append(edit)
    generator = random.Random(f"{seed} {part}")
    breaks: list[Break] = []
    for path, line in generator.sample(sorted(choices), len(choices)):
        if len(breaks) == number:
            break
        offered = choices[path, line]
        edit = generator.choice(offered)
        if generator.random() > _CHANCES.get(edit.operator, 1.0):
            continue
        identifier = f"{part}-{len(breaks):03}"
        made = _break(identifier, path, path.relative_to(package.parent).as_posix(), edit)
        if made is not None:
            breaks.append(made)
    return breaks


def _break(identifier: str, path: Path, name: str, edit: Edit) -> Break | None:
    source = path.read_text(encoding="utf-8")
    if not changes(source, edit):
        return None
    before, after = places(source), places(broken(source, edit))
    index = max(i for i, place in enumerate(before) if place.start < edit.line <= place.stop)
    place = before[index]
    if len(after) != len(before) or not place.start < place.stop:
        return None
    same = [p for p in before if (p.function, p.statement) == (place.function, place.statement)]
    return Break(
        identifier,
        name,
        place.function,
        edit.operator,
        source.split("\n")[edit.line - 1].strip(),
        edit.text.strip(),
        place.statement,
        after[index].statement,
        same.index(place),
    )


def in_other_words(text: str, words: Mapping[str, str]) -> str:
    """A text in which each word is replaced where it stands as a whole."""
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join(rf"(?<!\w){re.escape(old)}(?!\w)" for old in longest_first)
    return re.sub(pattern, lambda match: words[match[0]], text) if words else text


def translated(made: Break, words: Mapping[str, str]) -> Break:
    """The same break in other words."""

    def new(text: str) -> str:
        return in_other_words(text, words)

    function, statement, broken_statement = map(new, (made.function, made.statement, made.broken_statement))
    return replace(made, function=function, statement=statement, broken_statement=broken_statement)


def find(package: Path, made: Break) -> tuple[Path, Place] | None:
    """Where a break's statement stands now; None if that can't be told.

    Looked for first in its file and function, then in functions of that name elsewhere, last in all.
    """
    found = [
        (path, place)
        for path in sorted(package.rglob("*.py"))
        for place in places(path.read_text(encoding="utf-8"))
        if place.statement == made.statement
    ]
    name = made.function.rpartition(".")[2]
    at = package.parent / made.file
    near = [
        [f for f in found if f[0] == at and f[1].function == made.function],
        [f for f in found if f[1].function == made.function],
        [f for f in found if name and f[1].function.rpartition(".")[2] == name],
        [f for f in found if f[0] == at],
        found if len(made.statement) >= _LONG_ENOUGH else [],
    ]
    for candidates in near:
        if len({path for path, _ in candidates}) == 1 and len({f.function for _, f in candidates}) == 1:
            return candidates[min(made.occurrence, len(candidates) - 1)]
    return None


def applied(source: str, place: Place, statement: str) -> str:
    """A file with another statement, or another header, in a place."""
    lines = source.split("\n")
    indent = re.match(r"\s*", lines[place.start])
    assert indent is not None
    new = [indent[0] + line for line in statement.split("\n")]
    return "\n".join([*lines[: place.start], *new, *lines[place.stop :]])


def running(package: Path, path: Path, place: Place) -> dict[Path, set[int]]:
    """Lines (from 1) by file that run where a place matters: of a statement in a function its own; of a
    function's header its body; of what is on a file's or class's level the lines that name it."""
    start, stop = place.body
    if start <= place.start < stop:
        return {path: set(range(place.start + 1, place.stop + 1))}
    if place.stop <= start:
        return {path: set(range(start + 1, stop + 1))}
    names = set(re.findall(r"^(\w+)\b(?=\s*[:=])", place.statement))
    return {other: lines for other in sorted(package.rglob("*.py")) if (lines := set(_naming(other, names)))}


def _naming(path: Path, names: set[str]) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=name) if name in names:
                yield node.lineno
            case _:
                pass
