"""Each target of `make help` is run by CI, or its command is valid.

pytest tests/unit/test_make_targets.py
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_BY_CI = {"test", "check", "test-all", "setup", "acceptance-quick"}
"""Targets of .ci/run, and what these need."""
COMPARED = {
    "docs": "test_docs.py",
    "models": "test_models_page.py",
    "hardware": "test_hardware_page.py",
    "proto": "test_make_targets.py",
    "wheel": "test_wheel.py",
    "image": "test_deploy.py",
}
"""Unit tests that do what the target does, and compare."""
COLLECTED = ("test-fast", "chaos", "conformance", "pictures", "acceptance")
SAY_HELP = ("sdk-matrix", "demo", "serve")


def command_of(target: str) -> list[str]:
    """Return the last command that `make` would run, with this Python's programs."""
    make = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed-cpu", "-o", ".cookbook/.installed", target]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    words = shlex.split(printed.replace("\\\n", " ").strip().splitlines()[-1])
    return [str(Path(sys.executable).parent / word.rpartition("/")[2]) if "/bin/" in word else word for word in words]


def test_every_target_of_make_help_has_a_check() -> None:
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    ).stdout
    targets = set(re.findall(r"^make ([\w-]+)", said, re.MULTILINE))
    assert targets == RUN_BY_CI | set(COMPARED) | set(COLLECTED) | set(SAY_HELP)
    assert all(list((ROOT / "tests/unit").rglob(name)) for name in COMPARED.values())
    run = set(re.findall(r"^ *part \S+(?: - SECONDS\)\)\")? ([\w-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    assert {"test", "acceptance-quick", "test-slow"} <= run


@pytest.mark.heavy
@pytest.mark.parametrize("target", COLLECTED)
def test_the_command_of_a_target_collects_tests(target: str) -> None:
    command = [*command_of(target), "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "::test_" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.heavy
@pytest.mark.parametrize("target", SAY_HELP)
def test_the_command_of_a_target_says_its_help(target: str) -> None:
    done = subprocess.run([*command_of(target), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage:" in done.stdout.lower(), done.stderr[-2000:]


def test_the_committed_protobuf_modules_are_what_make_proto_writes(tmp_path: Path) -> None:
    command = [word.replace("_out=.", f"_out={tmp_path}") for word in command_of("proto")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    written = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*_pb2.py*")}
    assert len(written) == 2
    for name, path in written.items():  # the committed files are formatted
        assert ast.dump(ast.parse((ROOT / name).read_text())) == ast.dump(ast.parse(path.read_text())), name
