"""The demo with `--keep`: its server and dashboard stay until Ctrl-C, and it says what to do next.

pytest -m slow tests/e2e/test_demo.py
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_the_demo_leaves_its_server_until_it_is_interrupted(tmp_path: Path) -> None:
    program = ROOT / "examples/caltech10_demo.py"
    command = [sys.executable, str(program), "--keep", "--steps", "4", "--output", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    try:
        said = ""
        while "serve a model of your own" not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        found = re.search(r"goes on at (\S+) until Ctrl-C", said)
        assert found is not None
        for address in re.findall(rf"^  ({found[1]}\S*)$", said, re.MULTILINE):
            assert httpx.get(address, timeout=60).status_code == 200, address
        assert "/playground?model_path=tinker://" in said
        for page in re.findall(r"^  (docs/\S+)", said, re.MULTILINE):
            assert (ROOT / page).exists(), page
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=180)
    assert demo.returncode == 130
    with pytest.raises(httpx.TransportError):
        httpx.get(found[1], timeout=5)
