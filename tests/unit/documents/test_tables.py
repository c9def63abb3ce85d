"""The tables of measurements are those of the results that are committed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """``benchmarks/tables.py``, with its neighbours importable, as the command has them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("tables")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_committed_tables_are_made_from_the_committed_results(tables: ModuleType) -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"{page.name}: run python benchmarks/tables.py"


def test_another_number_in_a_table_is_noticed(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    changed = re.sub(r"(<!-- table: compare -->[^%]*?\d)\.\d MiB", r"\1.9 MiB, or so", text, count=1)
    assert changed != text
    assert tables.filled(changed) == text


def test_every_table_is_in_a_page_once(tables: ModuleType) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", text)) == sorted(tables.TABLES)
    assert text.count("<!-- end of table -->") == len(tables.TABLES)


def test_short_runs_are_not_taken_over(tables: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ddp.json").write_text('{"environment": {"command": "python benchmarks/ddp.py --quick"}}')
    with pytest.raises(SystemExit, match="ddp in .*: a look, not a measurement"):
        tables.take(tmp_path)


def test_results_are_taken_over(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"environment": {"command": "python benchmarks/ddp.py"}}'
    (tmp_path / "ddp.json").write_text(text)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "committed")
    tables.take(tmp_path)
    assert [path.name for path in (tmp_path / "committed").iterdir()] == ["ddp.json"]
    assert (tmp_path / "committed" / "ddp.json").read_text() == text


@pytest.mark.xfail(strict=True, reason="the full benchmarks are yet to be run")
def test_committed_results_are_measurements(tables: ModuleType) -> None:
    assert not [name for name in tables.NAMES if tables.is_look(tables.read(name))]
