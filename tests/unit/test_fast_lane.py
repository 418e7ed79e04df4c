"""`make test-fast` stays a contributor's loop: nothing in it imports torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.heavy


def ran(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    quiet = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTEST_ADDOPTS")}
    environment = {**quiet, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_no_file_of_the_fast_lane_imports_torch() -> None:
    """By the command of the Makefile, which here only collects."""
    given = [f"BIN={Path(sys.executable).parent}", "ARGS=-q -n 0 --collect-only -p no:cacheprovider"]
    said = ran(
        "make",
        "--no-print-directory",
        "--dry-run",
        "--old-file",
        ".venv/.installed-cpu",
        "EXTRA=cpu",
        *given,
        "test-fast",
    ).stdout
    collected = ran("sh", "-c", said)
    assert collected.returncode == 0 and collected.stdout.count("::") > 1000, collected.stdout[-4000:] + said


@pytest.mark.parametrize("place", ["product.py", "conftest.py"])
def test_an_import_of_torch_fails_by_the_name_of_its_file(place: str, tmp_path: Path) -> None:
    """Also where the import is lazy, behind other files, and after it an ImportError would be no failure."""
    guarded = "import contextlib\nwith contextlib.suppress(Exception):\n    import torch\n"
    (tmp_path / place).write_text(guarded)
    (tmp_path / "test_lazy.py").write_text(f"def test_it(): import {Path(place).stem}\n")
    python = (sys.executable, "-m", "pytest", "-p", "tests.no_torch", "-p", "no:cacheprovider")
    ended = ran(*python, "--rootdir", tmp_path, "test_lazy.py", cwd=tmp_path)
    assert ended.returncode != 0 and f"{place}:3 imports torch" in ended.stdout + ended.stderr, ended
