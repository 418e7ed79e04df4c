"""The count that `make conformance` prints.

pytest tests/unit/test_conformance_report.py
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.report import checklist, items_of

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_001_and_003_pass(): pass
def test_003_fails(): assert 1 == 2, "one is not two"
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.skip)])
def test_002_passes_or_is_skipped(n): pass
@pytest.mark.skip
def test_004_is_skipped(): pass
@pytest.fixture
def broken(): raise RuntimeError("no server")
def test_005_cannot_begin(broken): pass
"""


def test_the_checklist_has_every_number_once() -> None:
    assert list(checklist()) == list(range(1, 111)) and all(checklist().values())
    lines = (ROOT / "tests/conformance/checklist.txt").read_text().splitlines()
    assert len(lines) == len(set(checklist().values())) == 110


def test_a_tests_name_says_its_items() -> None:
    assert items_of("test_024_and_025_weights") == [24, 25] and items_of("test_110_old") == [110]
    for name in ("test_old", "test_24_old", "test_024"):
        with pytest.raises(pytest.UsageError, match=name):
            items_of(name)


def test_every_conformance_test_is_named_by_its_items_and_every_item_has_a_test() -> None:
    """`make conformance` runs nothing if a name has no item. CI runs these tests with all others."""
    files = sorted((ROOT / "tests/conformance").glob("test_*.py"))
    names = [
        name for path in files for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    assert len(names) > 110 and {item for name in names for item in items_of(name)} == set(checklist())


@pytest.mark.heavy
def test_an_item_passes_when_it_has_tests_and_all_of_them_pass(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conformance.report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "conformance: 2 of 110" in done.stdout
    assert (
        "    3 A wrong key is 401 when the client is made: test_003_fails: AssertionError: one is not two"
        in done.stdout
    )
    assert "    4 " in done.stdout and ": skipped" in done.stdout
    assert ": test_005_cannot_begin: RuntimeError: no server" in done.stdout
    assert "    6 Heartbeats: answered while idle, 404 unknown, 410 finished: no test" in done.stdout
    assert "    1 " not in done.stdout and "    2 " not in done.stdout
