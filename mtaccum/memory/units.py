"""Bytes as people write and read them; powers of 1024 are KiB, MiB and GiB."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from mtaccum.errors import ConfigError
from mtaccum.values import real_number

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_FORMS = (
    "a number with a unit, such as 6GiB, 800MiB or 6.5GB (GiB is 2^30 bytes, GB 10^9), or a number of bytes"
)


def parse_bytes(what: str, value: Any) -> int:
    """A number of bytes from ``6GiB``, ``1.5 GB`` or 6442450944.

    Args:
        what: the name of what is given, for the error.

    Raises:
        ConfigError: anything else, or a number that isn't above 0; lists the accepted forms.
    """
    number: float | None = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", value)
        if match is not None and match[2].lower() in _UNITS:
            number = float(match[1]) * _UNITS[match[2].lower()]
    else:
        with suppress(OverflowError):  # an int larger than any float
            number = real_number(value)
    if number is None or not math.isfinite(number) or number < 1:
        raise ConfigError(f"{what}: {value!r} is no amount of memory. Valid is {_FORMS}; above 0.")
    return int(value) if isinstance(value, int) else int(number)


def format_bytes(size_bytes: float) -> str:
    """Bytes for people, in powers of 1024: ``412.0 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} GiB"
