"""What pytest does in a run on a broken package, or on the intact one to see what its tests come to."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from breaks_reach import FOLDER, Current

# Cases of a test that are followed: so many, while the test has taken less than so long.
_FEW, _FEW_S = 3, 3.0
_SOME, _SOME_S = 8, 1.0


class Chosen:
    """Plugin that runs chosen tests.

    Args:
        order: ids of the tests to run, in this order; None: all.
        notes: file that gets a line of JSON as each test begins and ends.
    """

    def __init__(self, order: Sequence[str] | None, notes: Path) -> None:
        self._order = None if order is None else {test: number for number, test in enumerate(order)}
        self._notes = notes.open("a")
        self._seconds = 0.0

    def note(self, **values: Any) -> None:
        print(json.dumps(values), file=self._notes, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order is not None:
            order = dict(self._order)
            there = {item.nodeid for item in items}
            gone = {function_of(test): number for test, number in order.items() if test not in there}
            for item in items:
                if (name := function_of(item.nodeid)) in gone:  # its cases have other names now
                    order.setdefault(item.nodeid, gone[name])
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda item: order[item.nodeid])
        self.note(collected=len(items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(start=nodeid)
        self._seconds = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self.note(failed=report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.note(ended=nodeid, seconds=round(self._seconds, 3))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(failed=report.nodeid)


class Sample(Chosen):
    """Plugin that runs all tests, but of those with many cases only some, and tells those who follow which
    one is running."""

    def __init__(self, notes: Path) -> None:
        super().__init__(None, notes)
        self._current = Current(Path(os.environ[FOLDER]))
        self._numbers: dict[str, int] = {}
        self._cases: Counter[str] = Counter()
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._began = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cases = defaultdict(list)
        for item in items:
            cases[function_of(item.nodeid)].append(item)
        # drawn by their names, so that they are of all kinds, and the same ones each time
        drawn = {
            item
            for of_one in cases.values()
            for item in sorted(of_one, key=lambda i: _hash(i.nodeid))[:_SOME]
        }
        for item in items:
            if item not in drawn:
                self.note(left=item.nodeid)
        items[:] = [item for item in items if item in drawn]
        self._numbers = {item.nodeid: number for number, item in enumerate(items, 1)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = function_of(item.nodeid)
        cases, busy_s = self._cases[name], self._busy_s[name]
        if not (cases == 0 or (cases < _FEW and busy_s < _FEW_S) or busy_s < _SOME_S):
            self.note(left=item.nodeid)
            pytest.skip("enough cases")
        self._cases[name] += 1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        super().pytest_runtest_logstart(nodeid)
        self.note(number=self._numbers[nodeid], of=nodeid)
        self._current.set(self._numbers[nodeid])
        self._began = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        super().pytest_runtest_logfinish(nodeid)
        self._busy_s[function_of(nodeid)] += time.process_time() - self._began


def function_of(test: str) -> str:
    """A test's id without its case."""
    return test.partition("[")[0]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
