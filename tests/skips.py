"""A run fails on a test that is skipped for a reason that ``skips.txt`` doesn't list.

So no test falls silent because something is missing, or by mistake. ``--strict-skips`` is for where nothing
is missing: on Linux, with all extras.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

_EVERYWHERE = "everywhere"


def add_option(parser: pytest.Parser) -> None:
    """For ``pytest_addoption``."""
    parser.addoption(
        "--strict-skips", action="store_true", help="fail on a skip that skips.txt doesn't allow everywhere"
    )


def register(config: pytest.Config) -> None:
    """For ``pytest_configure``. Reports of all processes come to the one that has no ``workerinput``."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(allowed(strict=config.getoption("strict_skips"))))


def allowed(*, strict: bool) -> list[str]:
    """The reasons in the file, as patterns."""
    section, reasons = "", []
    for line in Path(__file__).with_name("skips.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#") and (section == _EVERYWHERE or not strict):
            reasons.append(line)
    return reasons


class Skips:
    """Looks at what is skipped, and ends the run with an error if it may not be.

    Args:
        patterns: of the reasons that there may be.
    """

    def __init__(self, patterns: list[str]) -> None:
        self._patterns = patterns
        self._faults: list[str] = []

    def _look_at(self, report: Any) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(fnmatchcase(reason, pattern) for pattern in self._patterns):
            self._faults.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that ran, or didn't."""
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that is skipped as a whole."""
        self._look_at(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The exit code."""
        if self._faults and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was skipped without being listed."""
        if self._faults:
            terminalreporter.section("skipped for reasons that tests/skips.txt doesn't allow here")
            for fault in self._faults:
                terminalreporter.line(fault)
