"""The operator's guide, block by block, with the small model in place of a large one.

pytest -m slow tests/e2e/test_operating.py
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker

from tests.collector import Collector

BLOCKS = re.findall(r"```console\n(.*?)```", (Path(__file__).parents[2] / "docs/operating.md").read_text(), re.DOTALL)
DOCTOR, KEYS, ADMIN, COMPOSE, STATUS, TRACES, BACKUP, DRILL, COMPLETION = BLOCKS
MODEL = "tinker-server/tiny-vl"
NAMED = "Qwen/Qwen3-VL-4B-Instruct=/models/Qwen3-VL-4B-Instruct"
NOT_RUN = {
    COMPOSE: "needs a Docker daemon; tests/unit/test_deploy.py checks the file, and each command of the server in it",
    DRILL: "needs a Docker daemon; tests/contract/test_deployed.py runs its script",
}
TRACED = "tinker-server serve"
"""The part of TRACES that needs no Docker daemon. Its other command starts Jaeger, whose place the test's collector
takes."""

pytestmark = pytest.mark.slow


@dataclass
class Guide:
    """A folder in which the guide is followed, and what its commands need to know of the server there."""

    folder: Path
    collector: Collector
    port: int
    keys: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def here(self, block: str, key: str = "") -> str:
        """The block with this server's address, a key, the small model, and folders of the test."""
        text = block.replace("http://127.0.0.1:8000", self.url).replace("tml-...", key).replace(NAMED, MODEL)
        text = text.replace("http://127.0.0.1:4318", self.collector.url).replace("/backups/", f"{self.folder}/backups/")
        return re.sub(r"(?<= )/data(?=\s|-again)", str(self.folder / "tinker-data"), text)

    def run(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def environment(home: Path) -> dict[str, str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": programs, "HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guide]:
    """A server with the keys of the guide, which sends traces as the guide says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Guide(tmp_path_factory.mktemp("guide"), Collector(), port, [])
    made.keys = re.findall(r"tml-\S+", made.run(made.here(KEYS)))
    (start,) = [line for line in made.here(TRACES).splitlines() if TRACED in line]
    script = start.replace(TRACED, f"exec {TRACED}")
    with (made.folder / "log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-e", "-c", f"{script} --port {port}"],
            cwd=made.folder,
            env=environment(made.folder),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert server.stdout is not None
    line = server.stdout.readline()
    assert made.url in line, (made.folder / "log").read_text()[-4000:]
    yield made
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    server.stdout.close()
    made.collector.close()


def test_every_block_is_run_or_says_why_not() -> None:
    run = {DOCTOR, KEYS, ADMIN, STATUS, TRACES, BACKUP, COMPLETION}
    assert run.isdisjoint(NOT_RUN) and run | NOT_RUN.keys() == set(BLOCKS)
    docker = [block for block in BLOCKS if re.search(r"^docker ", block, re.MULTILINE)]
    assert set(docker) == {*NOT_RUN, TRACES}, "a block that needs no daemon is not run"


def test_doctor_prints_the_plan_of_a_model(guide: Guide) -> None:
    said = guide.run(guide.here(DOCTOR))
    assert MODEL in said and "can be served" in said


def test_the_keys_have_the_scopes_that_the_guide_gives_them(guide: Guide) -> None:
    assert len(set(guide.keys)) == 4
    lines = (guide.folder / "tinker-data/keys").read_text().splitlines()
    fields = [re.findall(r"scope=\w+|role=\w+", line) for line in lines if not line.startswith("#")]
    assert fields == [[], ["scope=sample"], ["scope=metrics"], ["role=admin"]]


def test_status_and_the_administrators_commands_see_a_run_and_stop_it(guide: Guide) -> None:
    alice, _, _, root = guide.keys
    service = tinker.ServiceClient(base_url=guide.url, api_key=alice)
    run_id = service.create_lora_training_client(MODEL, rank=8).result().model_id
    assert run_id[:8] in guide.run(guide.here(STATUS, alice))
    said = guide.run(guide.here(ADMIN, root).replace("RUN", run_id))
    assert "alice" in said and run_id[:8] in said
    listed = guide.run(guide.here(ADMIN, root).splitlines()[0] + "\ntinker-server admin runs --owner alice")
    assert "ended" in listed


def test_traces_reach_the_collector(guide: Guide) -> None:
    service = tinker.ServiceClient(base_url=guide.url, api_key=guide.keys[0])
    service.create_sampling_client(base_model=MODEL).result().compute_logprobs(
        tinker.types.ModelInput.from_ints([1, 2, 3])
    ).result()
    deadline = time.monotonic() + 60
    while not (services := {span.service for span in guide.collector.spans()}) >= {"tinker-server", "tinker-sampler"}:
        assert time.monotonic() < deadline, services
        time.sleep(0.5)


def test_a_backup_of_the_running_server_is_restored(guide: Guide) -> None:
    for made in ("backups", "tinker-data-again"):  # by a first attempt
        shutil.rmtree(guide.folder / made, ignore_errors=True)
    said = guide.run(guide.here(BACKUP))
    assert "Restored from" in said and (guide.folder / "tinker-data-again/keys").is_file()


def test_the_completion_of_the_shell_is_written_into_a_new_home(guide: Guide) -> None:
    guide.run(COMPLETION)
    (script,) = (guide.folder / ".local/share/bash-completion/completions").iterdir()
    subprocess.run(["bash", "-n", script], check=True)
    assert "backup" in script.read_text()
