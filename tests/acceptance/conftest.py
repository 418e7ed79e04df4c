"""One server for all recipes, and the table that `make acceptance` prints."""

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.recipes import PYTHON, ROOT, Cookbook, served
from tests.servers import Server
from tinker_server.embedded import DIRECTORIES, TINY_VL


@dataclass(frozen=True)
class Row:
    """The result of one case."""

    case: str
    steps: int
    wall_s: float
    key_metric: str


ROWS: dict[str, Row] = {}
"""By test."""
NOT_PASSED: dict[str, str] = {}
"""By test, what it ended as."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--caltech101", type=Path, help="folder of parquet files with the columns image and label")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("acceptance")


@pytest.fixture(scope="session")
def cookbook_of_session(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Cookbook]:
    assert PYTHON.exists(), "the cookbook's environment is missing: run make acceptance"
    directory = tmp_path_factory.mktemp("cookbook")
    folder = directory / "folder"
    sources = [folder, DIRECTORIES[TINY_VL], ROOT / "examples" / "data" / "caltech10.zip"]
    if (caltech101 := pytestconfig.getoption("caltech101")) is not None:
        sources.append(caltech101)
    subprocess.run([PYTHON, ROOT / "tests" / "acceptance" / "working_folder.py", *sources], check=True)
    settings: dict[str, Any] = {"backend__stable_reinforce": "importance_sampling"}
    server = Server(directory / "data", served(folder), **settings).start()
    yield Cookbook(folder, server)
    assert server.stop() == 0, server.log.read_text()[-4000:]


@pytest.fixture
def cookbook(cookbook_of_session: Cookbook) -> Cookbook:
    """The cookbook, with its clock set back."""
    cookbook_of_session.spent_s = 0.0
    cookbook_of_session.steps = 0
    return cookbook_of_session


@pytest.fixture
def shows(request: pytest.FixtureRequest, cookbook: Cookbook) -> Callable[..., None]:
    """Puts the case's line into the table: its name and its key metric; `of`: a cookbook of the test's own."""

    def record(case: str, key_metric: str, of: Cookbook = cookbook) -> None:
        ROWS[request.node.nodeid] = Row(case, of.steps, of.spent_s, key_metric)

    return record


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/acceptance" in report.nodeid and (report.when == "call" or not report.passed) and not report.passed:
        NOT_PASSED[report.nodeid] = report.outcome
    elif report.when == "call" and "tests/acceptance" in report.nodeid:
        NOT_PASSED.pop(report.nodeid, None)  # it had been tried before
        ROWS.setdefault(report.nodeid, Row(report.nodeid.rpartition("::")[2], 0, report.duration, ""))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROWS and not NOT_PASSED:
        return
    write = terminalreporter.write_line
    write(time.strftime("acceptance, %Y-%m-%d %H:%M"))
    write("| case | steps | wall s | key metric | pass |")
    write("|---|---|---|---|---|")
    for test, row in ROWS.items():
        write(f"| {row.case} | {row.steps} | {row.wall_s:.0f} | {row.key_metric} | {NOT_PASSED.get(test, 'yes')} |")
    for test, outcome in NOT_PASSED.items():
        if test not in ROWS:
            write(f"| {test.rpartition('::')[2]} | | | | {outcome} |")
