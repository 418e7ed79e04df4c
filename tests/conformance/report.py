"""Reports the items of the protocol's checklist that pass; a pytest plugin that `make conformance` alone loads.

A test is named by the items that it covers, in three digits each: test_086_..., test_024_and_025_...
An item passes when one of its tests passes and none fails: the same tests on PostgreSQL are skipped where there is
none. checklist.txt has the items' titles, and the run fails unless all of them pass.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_NAME = re.compile(r"test_(\d{3}(?:_and_\d{3})*)_")


def checklist() -> dict[int, str]:
    """Titles by number."""
    lines = Path(__file__).with_name("checklist.txt").read_text().splitlines()
    return {int(number): title for number, _, title in (line.partition(" ") for line in lines)}


def items_of(test: str) -> list[int]:
    """The items in a test's name. Raises UsageError for a test without any."""
    match = _NAME.match(test)
    if match is None:
        raise pytest.UsageError(f"{test}: a conformance test is named by its items, such as test_086_...")
    return [int(number) for number in match[1].split("_and_")]


class Tally:
    """Counts while the tests run."""

    def __init__(self) -> None:
        self.tests: dict[int, list[str]] = {number: [] for number in checklist()}
        """Node ids by item."""
        self.problems: dict[str, str] = {}
        """Why a test did not pass."""
        self.ended: set[str] = set()
        self.skipped: set[str] = set()

    def not_passed(self) -> dict[int, str]:
        """Reasons by item."""
        return {number: why for number, tests in self.tests.items() if (why := self._reason(tests)) is not None}

    def _reason(self, tests: Iterable[str]) -> str | None:
        if not tests:
            return "no test"
        if self.skipped.issuperset(tests):
            return "skipped"
        for test in set(tests) - self.skipped:
            if (why := self.problems.get(test, None if test in self.ended else "did not run")) is not None:
                return f"{test.rpartition('::')[2]}: {why}"
        return None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for test in session.items:
            assert isinstance(test, pytest.Function)
            for number in items_of(test.originalname):
                self.tests[number].append(test.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ended.add(report.nodeid)
        if report.skipped:
            self.skipped.add(report.nodeid)
        elif not report.passed:
            self.problems.setdefault(report.nodeid, _short(report))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.not_passed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        titles, problems = checklist(), self.not_passed()
        terminalreporter.write_line(f"conformance: {len(titles) - len(problems)} of {len(titles)}")
        for number, why in problems.items():
            terminalreporter.write_line(f"  {number:3} {titles[number]}: {why}")


def _short(report: pytest.TestReport) -> str:
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return (lines[0][1:].strip() if lines else report.outcome)[:200]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tally())
