"""The quickstart, command by command, in a clone and an environment that have only what it says.

pytest tests/e2e/test_quickstart.py
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/index.md").read_text()
CONSOLE = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
(FIRST,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ON_CUDA = "pip install '.[gpu,sdk]'"
NOT_EDITABLE = "pip install --quiet --no-deps ."
"""Like the line for CUDA, this copies the server into the environment, which then lacks what the wheel lacks."""

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    """A new login's: without the environment that runs the tests."""
    own = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if part != own)
    # Compiled in advance, all packages would take a minute more; few of their modules are imported.
    return {**kept, "PATH": path, "OMP_WAIT_POLICY": "PASSIVE", "PIP_COMPILE": "0"}


def run(script: str, folder: Path) -> str:
    command = ["bash", "-e", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ways of installing give, with the CPU's packages."""
    on_cuda, on_cpu = CONSOLE[:2]
    folder = tmp_path_factory.mktemp("quickstart")
    run(on_cpu.replace("REPOSITORY", shlex.quote(str(ROOT))), folder)
    assert ON_CUDA in on_cuda
    enter = on_cuda.replace("git clone REPOSITORY tinker-server\n", "").replace("python3 -m venv .venv\n", "")
    run(enter.replace(ON_CUDA, NOT_EDITABLE), folder)
    return folder / "tinker-server"


@pytest.fixture(scope="module")
def url(clone: Path) -> Iterator[str]:
    """The server's address, on another port than the page's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = f". .venv/bin/activate\nexec {CONSOLE[2].strip()} --port {port}"
    server = subprocess.Popen(
        ["bash", "-e", "-c", script], cwd=clone, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    assert f"http://127.0.0.1:{port}" in line
    yield f"http://127.0.0.1:{port}"
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    server.stdout.close()


@pytest.mark.timeout(1800)
def test_the_quickstart_ends_with_the_sentence_that_was_learned(clone: Path, url: str) -> None:
    (clone / "first.py").write_text(FIRST.replace("http://127.0.0.1:8000", url))
    *steps, said = run(CONSOLE[3], clone).splitlines()
    losses = [float(line.split()[1]) for line in steps]
    assert losses[0] > 50 and losses[-1] < 0.5
    assert said == "The first words that this model has learned."
    for path in ("/docs/files/show.js", "/static/dashboard.js", "/login"):  # files that the wheel has
        assert httpx.get(f"{url}{path}", follow_redirects=True).status_code == 200, path


def test_the_quickstarts_doctor_finds_what_the_small_model_needs(clone: Path) -> None:
    doctor = CONSOLE[4].splitlines()[0].partition(" --model ")[0]
    assert "can be served" in run(f". .venv/bin/activate\n{doctor} --model tinker-server/tiny-vl", clone)


@pytest.mark.timeout(600)
def test_own_data_are_learned_as_their_page_says(clone: Path, url: str) -> None:
    page = (ROOT / "docs/own-data.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    (clone / "own_data.py").write_text(code.replace("http://127.0.0.1:8000", url))
    printed = run(". .venv/bin/activate\npython own_data.py", clone)
    found = re.findall(r"step (\d+): .*, (\d+\.\d+) on held-out rows", printed)
    said = {steps: float(loss) for loss, steps in re.findall(r"(\d\.\d+) after (\d+)", page)}
    # Other processors round otherwise, and 60 steps let that grow.
    assert {steps: float(loss) for steps, loss in found} == pytest.approx(said, rel=0.3)
    answers = re.findall(r"\? (\S+) - right: (\S+)|code\. (\S+) - right: (\S+)", printed)
    assert len(answers) == 6 and all(one[0] == one[1] and one[2] == one[3] for one in answers[3:])
