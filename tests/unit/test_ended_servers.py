"""A server that a test has started ends with the test, also where that fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

FAILS = """
import subprocess
from pathlib import Path

from tests.servers import Server, RUNNING

def test_it_fails(tmp_path):
    server = Server(tmp_path, {})
    server.process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
    RUNNING.add(server)
    Path("pid").write_text(str(server.process.pid))
    raise AssertionError
"""


@pytest.mark.heavy
def test_a_server_that_a_failing_test_has_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest"]
    command = [*pytest, "--rootdir", str(tmp_path), "test_fails.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed" in ended.stdout, ended.stdout + ended.stderr
    pid = int((tmp_path / "pid").read_text())
    left = psutil.pid_exists(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left
