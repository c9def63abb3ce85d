"""The rows of ``gpu.py`` as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markdown_tables import markdown_table

__all__ = ["tables_of"]

_MIB = 2**20
Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]  # its head, and what it shows of a row


def tables_of(name: str, found: Mapping[str, Any]) -> str:
    """A part of the results: its title, how it ended, its tables."""
    part = found["parts"][name]
    head = f"## {part['title']}: {part['status']} ({part['elapsed_s']:.0f} s)"
    said = [part["reason"]] if part["reason"] else []
    rows = part["rows"]
    if name == "machine":
        said += [f"- {key}: {value}" for key, value in found["environment"].items()]
    if name == "tests":
        said += _of_tests(rows)
    for table in dict.fromkeys(row.get("table", "") for row in rows):
        columns = _COLUMNS.get(name, {}).get(table, _LINK if table == "link" else ())
        if columns:
            said.append(_table(columns, [row for row in rows if row.get("table", "") == table]))
    return "\n\n".join([head, *said])


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    heads, shows = zip(*columns, strict=True)
    texts = sum(not head.startswith(" ") for head in heads)
    cells = [[show(row) for show in shows] for row in rows]
    return markdown_table([head.strip() for head in heads], cells, texts)


def _of_tests(rows: Sequence[Row]) -> list[str]:
    counts = Counter((row["outcome"], row["reason"] * (row["outcome"] == "skipped")) for row in rows)
    lines = [
        f"- {number} {outcome}{f': {reason}' * bool(reason)}" for (outcome, reason), number in counts.items()
    ]
    bad = [row for row in rows if row["outcome"] not in ("passed", "skipped")]
    return [*lines, *(f"- {row['outcome']}: {row['test']}: {row['reason']}" for row in bad)]


# --- columns; a head that begins with a space is over numbers -----------------------------------------------


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _mib(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key] / _MIB:.1f}"


def _number(key: str, form: str = ".3f") -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key]:{form}}"


def _ratio(key: str = "ratio") -> Callable[[Row], str]:
    def show(row: Row) -> str:
        ratio = row[key]
        return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"

    return show


def _ms(key: str) -> Callable[[Row], str]:
    return lambda row: f"{1e3 * row[key]:.2f}"


def _beyond(row: Row) -> str:
    """What the allocator has reserved beyond the tensors."""
    if row.get("reserved_bytes") is None:
        return ""
    return f"{(row['reserved_bytes'] - row['allocated_bytes']) / _MIB:.1f}"


_STEP: list[Column] = [("model", _text("model")), ("way", _text("way"))]
_BYTES: list[Column] = [
    (" live tensors, MiB", _mib("live_bytes")),
    (" allocated, MiB", _mib("allocated_bytes")),
    (" reserved beyond, MiB", _beyond),
]
_TIMES: list[Column] = [(" time over the first", _ratio()), (" median, ms", _ms("median_s"))]
_LINK: list[Column] = [
    ("copy", _text("copy")),
    (" GB/s", lambda row: f"{row['bytes_per_s'] / 1e9:.1f}"),
    (" MiB", _mib("bytes")),
]
_COLUMNS: dict[str, dict[str, list[Column]]] = {
    "memory": {
        "passes": [
            ("model", _text("case")),
            ("schedule", _text("schedule")),
            (" activations, MiB", _mib("activation_bytes")),
            (" over summed", _number("over_summed")),
            (" total peak, MiB", _mib("peak_bytes")),
        ],
        "steps": [*_STEP, *_BYTES],
    },
    "prediction": {
        "": [
            *_STEP,
            (" predicted, MiB", _mib("predicted_bytes")),
            *_BYTES,
            (" over live", _number("over_live")),
            (" over allocated", _number("over_allocated")),
            (" over reserved", _number("over_reserved")),
        ]
    },
    "reserve": {
        "": [
            ("after", _text("stage")),
            (" used, MiB", _mib("used_bytes")),
            (" allocated at most, MiB", _mib("allocated_bytes")),
            (" reserved at most, MiB", _mib("reserved_bytes")),
            (" used beside the allocator, MiB", _mib("beside_bytes")),
        ],
        "compared": [
            (" predicted, MiB", _mib("predicted_bytes")),
            (" used, MiB", _mib("used_bytes")),
            (" needed beside the prediction, MiB", _mib("needed_bytes")),
            (" held in reserve, MiB", _mib("assumed_bytes")),
            (" needed over held", _number("needed_over_assumed")),
        ],
    },
    "time": {
        "steps": [*_STEP, *_TIMES],
        "pairs": [("step time", _text("what")), (" ratio", _ratio()), (" reach", _number("reach", ".2f"))],
    },
    "syncs": {
        "": [
            ("way", _text("way")),
            ("batch on", _text("batch")),
            (" micro-batches", _text("accumulate")),
            (" synchronisations", _number("synchronisations", "d")),
            (" values read", _number("reads", "d")),
        ]
    },
    "ranks": {
        "": [
            ("kind", _text("kind")),
            ("backend", _text("backend")),
            (" ranks", _text("ranks")),
            (" gradients differ by", _number("difference", ".1e")),
        ]
    },
    "precision": {"steps": [*_STEP, *_TIMES, *_BYTES, (" norm over fp32", _number("norm_over_fp32", ".4f"))]},
    "recompute": {"steps": [*_STEP, *_TIMES, *_BYTES]},
    "offload": {
        "steps": [
            *_STEP,
            *_TIMES,
            *_BYTES,
            (" to the host, MiB", _mib("to_host_bytes")),
            (" to the device, MiB", _mib("to_device_bytes")),
        ]
    },
    "copies": {"steps": [("way", _text("way")), ("batch on", _text("batch")), *_TIMES]},
    "compile": {"steps": [*_STEP, *_TIMES, (" first step, s", _number("first_step_s", ".1f"))]},
}
