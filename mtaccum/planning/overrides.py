"""Overrides: values as the command's grammar (Hydra's) takes them literally."""

from __future__ import annotations

import json
import re
from typing import Any

# what the grammar reads as a text without quotes, in lists too
_PLAIN = re.compile(r"[A-Za-z_./-][\w./-]*")
_NOT_TEXT = {"null", "true", "false", "nan", "inf", "-inf", "on", "off", "yes", "no", "y", "n"}


def override_value(value: Any) -> str:
    """A plain value: ``[trunk.layer1,"trunk.layer3[0:3]"]``, ``{seg:4}``, ``0.5``."""
    if isinstance(value, dict):
        # its keys have no quotes
        return f"{{{','.join(f'{key}:{override_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(override_value, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    """A text, in quotes where the grammar would take it for something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT and not text.startswith("-"):
        return text
    # a backslash means something before a quote only, and at the end, where the closing one follows
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), text)
    return f'"{escaped}"'
