"""What MkDocs calls while it builds the site: fills in what is made from the code, so that it can't go stale.

A line ``<!-- generated: NAME -->`` in a page is replaced by what ``GENERATORS[NAME]`` returns, as Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import config_tables
import option_table

ROOT = Path(__file__).parents[2]
_PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def changelog() -> str:
    """The changelog below its title."""
    _, _, text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")
    return text


GENERATORS: dict[str, Callable[[], str]] = {
    "changelog": changelog,
    "configuration": config_tables.configuration,
    "groups": config_tables.groups,
    "option-table": option_table.option_table,
}


def fill(markdown: str) -> str:
    """A page's Markdown with everything generated in its place.

    Raises:
        KeyError: a name that no generator has.
    """
    return _PLACE.sub(lambda found: GENERATORS[found[1]](), markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return fill(markdown)
