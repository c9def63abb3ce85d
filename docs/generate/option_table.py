"""The table option x schedule x kind of ranks, made from the checks that the engine itself runs."""

from __future__ import annotations

from mtaccum.engine.options import SCHEDULES, compatibility
from mtaccum.parallel import KINDS

_SINGLE = "none"


def option_table() -> str:
    """For each option under which schedule, and on which ranks, it works; and why not, where it doesn't."""
    found = {(name, schedule, kind): reason for name, schedule, kind, reason in compatibility(KINDS)}
    names = list(dict.fromkeys(name for name, _, _ in found))
    several = [kind for kind in KINDS if kind != _SINGLE]
    rows = [
        [
            f"`{name}`",
            *(_cell(found[name, schedule, _SINGLE]) for schedule in SCHEDULES),
            *(_cell(found[name, "split", kind]) for kind in several),
        ]
        for name in names
    ]
    head = [
        "option",
        *(f"`{schedule}`" for schedule in SCHEDULES),
        *(f"`parallel={kind}`" for kind in several),
    ]
    reasons = dict.fromkeys(reason for reason in found.values() if reason is not None)
    listed = "\n".join(f"- {reason}" for reason in reasons)
    table = markdown([head, ["---"] * len(head), *rows])
    return f"{table}\n\nWhat is refused, and with which words:\n\n{listed}"


def _cell(reason: str | None) -> str:
    return "works" if reason is None else "refused"


def markdown(lines: list[list[str]]) -> str:
    """Lines of cells as a Markdown table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
