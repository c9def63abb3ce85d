"""Files that the commands leave in a run's folder, and exit codes: what they were (``tests/public.py``)."""

from __future__ import annotations

from pathlib import Path

import public_commands
from commands import Forked
from public import difference


def test_files_and_exit_codes(tmp_path: Path, forked: Forked) -> None:
    changed = difference("commands", public_commands.collect(tmp_path, forked))
    assert not changed, changed


def test_what_differs_in_each_run_stands_as_a_star(tmp_path: Path) -> None:
    for name in ("events.out.tfevents.17.host.2.0", "events.out.tfevents.18.host.3.0", "last.pt", "a/x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert public_commands.files_in(tmp_path) == ["a/x.bin", "events.out.tfevents.*", "last.pt"]
    assert public_commands.files_in(tmp_path / "nowhere") == []
