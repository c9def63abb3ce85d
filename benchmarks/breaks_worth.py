"""Which code is worth a break.

Left out is what no test should look at: docstrings, messages, annotations, imports, assertions, logging; and
statements that give something its name, since without them all fails at once.
"""

from __future__ import annotations

import ast
import re

_LOGGING = re.compile(r"^(_?LOG|log|logger|logging|warnings)\.|^(warn|print)\(", re.IGNORECASE)
_UNTESTED_KEYWORDS = {"strict", "stacklevel", "category", "frozen", "slots", "repr", "check", "encoding"}


def untested(node: ast.AST) -> bool:
    """Whether nothing below a node is worth a break."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Match():
            return True
        case ast.Expr(value=ast.Constant()):
            return True  # docstrings and ``...``
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name.startswith("__") or ast.unparse(value).startswith(("TypeVar(", "logging."))
        case ast.If(test=test) if ast.unparse(test).endswith("TYPE_CHECKING"):
            return True
        case ast.FunctionDef(name=name, decorator_list=decorators):
            return name in ("__repr__", "__str__") or "overload" in map(ast.unparse, decorators)
        case ast.ClassDef(bases=bases):
            return any(ast.unparse(base).startswith("Protocol") for base in bases)
        case ast.Call():
            return _LOGGING.match(ast.unparse(node)) is not None
        case ast.keyword(arg=name):
            return name in _UNTESTED_KEYWORDS
        case _:
            return False


def droppable(node: ast.stmt, function: ast.FunctionDef | None) -> bool:
    """Whether a name isn't missing elsewhere as soon as the statement is."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            return not _LOGGING.match(ast.unparse(node))
        case ast.Continue() | ast.Break() | ast.Return(value=None):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return function is None or function.name != "__init__"
        case _:
            return False
