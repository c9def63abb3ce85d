"""One-line breaks of a source file: what a slip of the hand could have written instead.

Operators walk the syntax tree, and change text on a single line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from breaks_worth import droppable, untested

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_FUNCTIONS = {"max": "min", "min": "max", "any": "all", "all": "any", "sum": "max", "sorted": "list"}
_DROPPED_METHODS = {"clone", "detach", "copy", "contiguous", "abs", "coalesce"}
_ORDERED = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "map", "zip", "cast"}
_EMPTY = {"list": "[]", "dict": "{}", "tuple": "()", "set": "set()", "frozenset": "frozenset()"}
_SMALL, _FACTOR, _LARGE = 0.1, 1000, 32


class Edit(NamedTuple):
    """A line (counted from 1), what stands there after the break, and the operator's name."""

    line: int
    text: str
    operator: str


def edits(source: str) -> list[Edit]:
    """All breaks of a file in the order of its lines; ``changes`` tells which are any."""
    lines = source.encode().split(b"\n")
    found: dict[tuple[int, str], Edit] = {}
    for (line, start), stop, replacement, operator in _Walk(lines).changes(ast.parse(source)):
        whole = lines[line - 1]
        text = (whole[:start] + replacement.encode() + whole[stop:]).decode()
        found.setdefault((line, text), Edit(line, text, operator))
    return sorted(found.values())


def broken(source: str, edit: Edit) -> str:
    """The file with the break in it."""
    lines = source.split("\n")
    lines[edit.line - 1] = edit.text
    return "\n".join(lines)


def changes(source: str, edit: Edit) -> bool:
    """Whether the broken file parses, to something else than before."""
    try:
        return ast.dump(ast.parse(broken(source, edit))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


_Change = tuple[tuple[int, int], int, str, str]  # (line, column), end column, replacement, operator


class _Walk:
    """Goes through a tree, with the source at hand."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def changes(self, node: ast.AST, function: ast.FunctionDef | None = None) -> Iterator[_Change]:
        """Changes of a node, which may be in a function, and of what is below it."""
        if untested(node):
            return
        yield from self._own(node, function)
        if isinstance(node, ast.FunctionDef):
            function = node
        if isinstance(node, ast.Raise):
            return  # dropped as a whole at most: what it says is a message
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    yield from self.changes(child, function)

    def _own(self, node: ast.AST, function: ast.FunctionDef | None) -> Iterator[_Change]:
        match node:
            case ast.Compare():
                for op, a, b in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
                    yield from self._token(a, b, *_COMPARISONS[type(op)], "comparison")
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                yield from self._token(node.values[0], node.values[1], old, new, "and/or")
            case ast.BinOp():
                yield from self._binary(node)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield from self._whole(node, f"({self._text(node.operand)})", "no not, no minus")
            case ast.Constant():
                yield from self._constant(node)
            case ast.If() | ast.While() | ast.IfExp():
                yield from self._negated(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    yield from self._negated(test)
            case ast.Return(value=ast.expr() as value):
                yield from self._returned(value, function)
            case ast.Call():
                yield from self._call(node)
            case ast.With():
                if all(item.optional_vars is None for item in node.items):
                    first, last = node.items[0].context_expr, node.items[-1].context_expr
                    header = self._between((node.lineno, node.col_offset), first, last)
                    if header is not None:
                        yield (node.lineno, node.col_offset), header, "if True", "no context"
            case ast.stmt() if droppable(node, function):
                yield from self._whole(node, "pass", "no statement")
            case _:
                pass

    def _binary(self, node: ast.BinOp) -> Iterator[_Change]:
        literal = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp)
        sides = (node.left, node.right)
        if any(
            isinstance(s, literal) or (isinstance(s, ast.Constant) and type(s.value) is str) for s in sides
        ):
            return
        if isinstance(node.op, ast.BitOr) and all(self._text(side)[:1].isupper() for side in sides):
            return  # a union of types
        if type(node.op) in _ARITHMETIC:
            yield from self._token(*sides, *_ARITHMETIC[type(node.op)], "arithmetic")
        if isinstance(node.op, (ast.Sub, ast.Div)):
            sign = "-" if isinstance(node.op, ast.Sub) else "/"
            left, right = map(self._text, sides)
            yield from self._whole(node, f"({right}) {sign} ({left})", "operands swapped")

    def _constant(self, node: ast.Constant) -> Iterator[_Change]:
        value = node.value
        if isinstance(value, bool):
            yield from self._whole(node, str(not value), "True/False")
        elif isinstance(value, int):
            yield from self._whole(node, str(value * 10 if value >= _LARGE else value + 1), "number")
        elif isinstance(value, float):
            small = 0 < abs(value) < _SMALL
            changed = value * _FACTOR if small else value * 2 if value else 1.0
            yield from self._whole(node, repr(changed), "tolerance" if small else "number")
            if small:
                yield from self._whole(node, repr(value / _FACTOR), "tolerance")
        elif isinstance(value, str) and re.fullmatch(r"[a-z]\w*", value):
            yield from self._whole(node, repr(f"{value}_"), "choice")

    def _negated(self, test: ast.expr) -> Iterator[_Change]:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            yield from self._whole(test, f"not ({self._text(test)})", "condition negated")

    def _returned(self, value: ast.expr, function: ast.FunctionDef | None) -> Iterator[_Change]:
        returns = function.returns if function is not None else None
        kind = re.split(r"\W", ast.unparse(returns))[0] if returns is not None else ""
        text = self._text(value)
        changed = {"bool": f"not ({text})", "int": f"({text}) + 1", "float": f"2 * ({text})"}
        changed |= {"Tensor": f"2 * ({text})", **_EMPTY}
        if kind != "str" and text != "None":
            yield from self._whole(value, changed.get(kind, "None"), "returned value")

    def _call(self, node: ast.Call) -> Iterator[_Change]:
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if len(plain) == len(node.args) >= 2 and ast.unparse(node.func) not in _ORDERED:
            end = self._between((plain[0].lineno, plain[0].col_offset), plain[1], plain[1])
            if end is not None:
                swapped = f"{self._text(plain[1])}, {self._text(plain[0])}"
                yield (plain[0].lineno, plain[0].col_offset), end, swapped, "arguments swapped"
        for keyword in node.keywords:
            if keyword.arg is not None and not untested(keyword):
                line, start, stop = keyword.lineno, keyword.col_offset, keyword.end_col_offset
                if keyword.end_lineno == line and stop is not None:
                    before = re.search(rb",\s*$", self._lines[line - 1][:start])
                    after = re.match(rb",\s*", self._lines[line - 1][stop:])
                    start, stop = (
                        (before.start(), stop) if before else (start, stop + (after.end() if after else 0))
                    )
                    yield (line, start), stop, "", "no keyword argument"
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            yield from self._whole(node.func, _FUNCTIONS[node.func.id], "function")
        if isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED_METHODS and not node.args:
            yield from self._whole(node, self._text(node.func.value), "no method")

    def _whole(self, node: ast.expr | ast.stmt, replacement: str, operator: str) -> Iterator[_Change]:
        if node.end_lineno == node.lineno and node.end_col_offset is not None:
            yield (node.lineno, node.col_offset), node.end_col_offset, replacement, operator

    def _token(self, a: ast.expr, b: ast.expr, old: str, new: str, operator: str) -> Iterator[_Change]:
        """Another token between two expressions."""
        if a.end_lineno == b.lineno and a.end_col_offset is not None:
            between = self._lines[b.lineno - 1][a.end_col_offset : b.col_offset].decode()
            if (match := re.search(rf"(?<![<>=!*/]){re.escape(old)}(?![<>=*/])", between)) is not None:
                start = a.end_col_offset + match.start()
                yield (b.lineno, start), start + len(old), new, operator

    def _between(self, start: tuple[int, int], first: ast.expr, last: ast.expr) -> int | None:
        """The column where ``last`` ends, if all of it is on the line of ``start``."""
        return last.end_col_offset if start[0] == first.lineno == last.end_lineno else None

    def _text(self, node: ast.expr) -> str:
        if node.end_lineno != node.lineno:
            return ast.unparse(node)
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
