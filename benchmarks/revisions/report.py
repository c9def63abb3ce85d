"""Two lists of observations entry by entry: what differs, and tables of what was compared."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import markdown_table

__all__ = ["Difference", "compare", "differences_text", "read", "tables"]

Observations = dict[tuple[str, str], dict[str, Any]]  # by kind and name of the case, by quantity

_MISSING = "nothing"
_SHOWN = 40


@dataclass(frozen=True)
class Difference:
    """One value that isn't the same; ``quantity`` may name an entry: ``gradients: trunk.weight``."""

    kind: str
    case: str
    quantity: str
    base: Any
    head: Any

    @property
    def of(self) -> str:
        """The quantity without the name of the entry."""
        return self.quantity.split(": ")[0]

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.case}\n    {self.quantity}\n      base {self.base}\n      head {self.head}"
        )


def read(paths: Iterable[Path]) -> Observations:
    """What workers wrote down."""
    lines = (json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines())
    return {(kind, case): seen for kind, case, seen in lines}


def compare(base: Observations, head: Observations) -> list[Difference]:
    """All that differs. A case that failed in either, or that one of them lacks, differs."""
    return [
        Difference(*key, quantity, *values)
        for key in dict.fromkeys([*base, *head])
        for quantity, values in _of_case(base.get(key), head.get(key))
    ]


def _of_case(base: Mapping[str, Any] | None, head: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    if base is None or head is None:
        ran, missing = "was run", "was not run"
        yield "case", (missing if base is None else ran, missing if head is None else ran)
        return
    for quantity in dict.fromkeys([*base, *head]):
        one, other = base.get(quantity, _MISSING), head.get(quantity, _MISSING)
        if quantity == "failed":
            yield quantity, (one, other)
        elif one != other:
            yield from _of_values(quantity, one, other)


def _of_values(quantity: str, base: Any, head: Any) -> Iterator[tuple[str, Any]]:
    """The entries that differ, of values with entries; otherwise the values."""
    if isinstance(base, dict) and isinstance(head, dict):
        for name in dict.fromkeys([*base, *head]):
            one, other = base.get(name, _MISSING), head.get(name, _MISSING)
            if one != other:
                yield f"{quantity}: {name}", (one, other)
    else:
        yield quantity, (base, head)


def tables(base: Observations, head: Observations, differences: Iterable[Difference]) -> str:
    """How many cases of each kind, and how many values of each quantity, were compared and differ."""
    differing: dict[str, set[str]] = defaultdict(set)
    of_quantity: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for difference in differences:
        differing[difference.kind].add(difference.case)
        of_quantity[difference.of].add((difference.kind, difference.case))
    cases = Counter(kind for kind, _ in dict.fromkeys([*base, *head]))
    refused = Counter(
        key[0] for key in base.keys() & head.keys() if "refused: run" in base[key].keys() & head[key]
    )
    kinds = markdown_table(
        ["kind of case", "cases", "equal", "differing", "refused by both"],
        [
            (kind, str(n), str(n - len(differing[kind])), str(len(differing[kind])), str(refused[kind]))
            for kind, n in cases.items()
        ],
    )
    seen = Counter(quantity.split(": ")[0] for case in (*base.values(), *head.values()) for quantity in case)
    both = Counter(
        quantity.split(": ")[0]
        for key in base.keys() & head.keys()
        for quantity in base[key].keys() & head[key]
    )
    quantities = markdown_table(
        ["quantity", "cases compared", "differing"],
        [(name, str(both[name]), str(len(of_quantity[name]))) for name in seen],
    )
    return f"{kinds}\n\n{quantities}"


def differences_text(differences: list[Difference], every: bool = False) -> str:
    """All differences, or the first of them: of each kind of case and quantity in turn."""
    if every or len(differences) <= _SHOWN:
        return "\n".join(map(str, differences))
    turns: Counter[tuple[str, str]] = Counter()
    ranked: list[tuple[int, int]] = []
    for index, difference in enumerate(differences):
        key = difference.kind, difference.of
        turns[key] += 1
        ranked.append((turns[key], index))
    shown = sorted(index for _, index in sorted(ranked)[:_SHOWN])
    text = "\n".join(str(differences[index]) for index in shown)
    return f"{text}\n... and {len(differences) - _SHOWN} more (--all shows them)"
