"""Bytes as people write and read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mtaccum import ConfigError
from mtaccum.memory import format_bytes, parse_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("6GiB", 6 * GIB),
        ("6 GiB", 6 * GIB),
        ("  6gib ", 6 * GIB),
        ("1.5 GB", 1_500_000_000),
        (".5MiB", 2**19),
        ("5.KiB", 5 * 1024),
        ("800MB", 800_000_000),
        ("1TiB", 2**40),
        ("2 TB", 2 * 10**12),
        ("3kb", 3000),
        ("17B", 17),
        (np.int64(17), 17),
        (np.float32(17.5), 17),
        ("17", 17),
        (6442450944, 6442450944),
        (2.0 * GIB, 2 * GIB),
        (1023.9, 1023),
        (np.float64(5e9), 5_000_000_000),
        (1, 1),
    ],
)
def test_amounts_are_read(given: Any, expected: int) -> None:
    value = parse_bytes("memory.budget", given)
    assert value == expected
    assert type(value) is int


WRONG = [
    *("6GiBs", "6 potatoes", "GiB", "", " ", "-6GiB", "+6GiB", "6,5GiB", "1e9", "6GiB!", "6GiB 2MiB", "0x10"),
    *("0", "0GiB", "0.4", "nan", "inf", "None", "six", "\uff16GiB"),
    *(0, -1, 0.5, -3.5, math.nan, math.inf, -math.inf, True, False, None, [], [6], {}, 3j, b"6GiB", object),
    *(10**400, np.int64(-3), np.complex64(3), np.array(6), np.bool_(True)),
]


@pytest.mark.parametrize("given", WRONG, ids=repr)
def test_what_is_no_amount_is_refused_with_the_accepted_forms(given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bytes("memory.budget", given)
    text = str(refused.value)
    assert text.startswith(f"memory.budget: {given!r} is no amount of memory.")
    for form in ("6GiB", "800MiB", "6.5GB", "a number of bytes", "above 0"):
        assert form in text


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (412 * 2**20, "412.0 MiB"),
        (1.25 * GIB, "1.25 GiB"),
        (3000 * GIB, "3000.00 GiB"),
    ],
)
def test_amounts_are_written(size_bytes: float, expected: str) -> None:
    assert format_bytes(size_bytes) == expected


def test_what_is_written_can_be_read_again() -> None:
    for size_bytes in (900, 5 * 1024, 700 * 2**20, 3 * GIB):
        assert parse_bytes("size", format_bytes(size_bytes)) == size_bytes
