"""What of mtaccum is public, beside what it was when somebody last looked: ``public.json``.

Names with their signatures (``public_names.py``), config keys (``public_config.py``), names in the README
(``public_readme.py``), and what the commands leave and return (``public_commands.py``). The tests compare
each section with what is stored. From version 0.2.0 on what is public changes only with a deprecation: the
old goes on working for a release, and warns. A change that is meant to be is accepted with

    python tests/public.py --write
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_suffix(".json")
_CONTEXT = 3  # lines around a change


def difference(section: str, now: Any) -> str:
    """How a section differs from what is stored, and what to do about it; "" if it doesn't."""
    before = json.loads(STORED.read_text(encoding="utf-8")).get(section)
    lines = [json.dumps(values, indent=1).splitlines() for values in (before, now)]
    changed = difflib.unified_diff(*lines, "tests/public.json", "now", lineterm="", n=_CONTEXT)
    text = "\n".join(changed)
    if not text:
        return ""
    return (
        f"what is public has changed, in {section}:\n{text}\n\n"
        f"From version 0.2.0 on a public name, option, file or exit code changes only with a deprecation: "
        f"the old one goes on working for a release, and warns. If that is so, or something is only added, "
        f"accept it with\n\n    python tests/public.py --write\n\nand say in CHANGELOG.md what has changed."
    )


def sections() -> dict[str, Any]:
    """All that is public now."""
    # here, so that a test of one section needs nothing of the others
    import public_commands
    import public_config
    import public_names
    import public_readme
    from commands import Forked

    names, config = public_names.collect(), public_config.collect()
    found = {"names": names, "config": config, "readme": public_readme.collect(names, config)}
    with tempfile.TemporaryDirectory() as folder:
        forked = Forked(Path(folder))
        try:
            found["commands"] = public_commands.collect(Path(folder), forked)
        finally:
            forked.close()
    return found


def main() -> None:
    """Show how what is public differs from what is stored; with ``--write`` store it."""
    parser = argparse.ArgumentParser(description="What of mtaccum is public, beside what it was.")
    parser.add_argument("--write", action="store_true", help="accept it: write tests/public.json")
    options = parser.parse_args()
    found = sections()
    if options.write:
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"written: {STORED}")
        return
    changed = [text for section, now in found.items() if (text := difference(section, now))]
    print("\n\n".join(changed) or "nothing has changed")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
