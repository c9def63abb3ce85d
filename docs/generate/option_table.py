"""The table option x schedule x kind of ranks, made from the checks that the engine itself runs."""

from __future__ import annotations

import importlib

_MODULE, _FUNCTION = "mtaccum.engine.options", "table"
_MISSING = "This version of the engine doesn't list what goes together; what doesn't is refused by name."


def option_table() -> str:
    """What ``mtaccum.engine.options.table()`` returns, as Markdown; a sentence where there is no such table.

    It returns the heads of the columns and the rows, both as plain text.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError:
        return _MISSING
    if (table := getattr(module, _FUNCTION, None)) is None:
        return _MISSING
    head, rows = table()
    return markdown([list(head), ["---"] * len(head), *(list(row) for row in rows)])


def markdown(lines: list[list[str]]) -> str:
    """Lines of cells as a Markdown table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
