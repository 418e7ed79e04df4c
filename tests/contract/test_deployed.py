"""Commands of `deploy/` and of the operator's guide, run as a kubelet, compose or an operator runs them.

pytest tests/contract/test_deployed.py
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.databases import fresh_database
from tests.fake_server import Running

ROOT = Path(__file__).parents[2]
MANIFESTS: list[Any] = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
COMPOSE: Any = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
IMAGE_ENVIRONMENT = dict(re.findall(r"(TINKER_SERVER_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
SERVER_OF_FAKES = """
import sys, tinker_server.__main__ as main, tinker_server.app as app
from tests.fakes import FakeBackend
main.create_app = lambda settings, **rest: app.create_app(settings, FakeBackend())
sys.exit(main.main())
"""
Shell = Callable[..., subprocess.CompletedProcess[str]]


def manifest(kind: str, name: str) -> Any:
    (found,) = [one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def service_links() -> dict[str, str]:
    """Variables that a kubelet sets for each Service with an address of its own."""
    links: dict[str, str] = {}
    for one in MANIFESTS:
        if one["kind"] == "Service" and one["spec"].get("clusterIP") != "None":
            name = one["metadata"]["name"].upper().replace("-", "_")
            port = one["spec"]["ports"][0]["port"]
            links |= {f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_SERVICE_PORT": str(port)}
            links |= {f"{name}_PORT": f"tcp://10.0.0.1:{port}", f"{name}_PORT_{port}_TCP_ADDR": "10.0.0.1"}
    return links


def injected(pod: Any) -> dict[str, str]:
    return service_links() if pod.get("enableServiceLinks", True) else {}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a script as in the image, whose folders /data and /backups are in the test's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "backups").mkdir()
    program = tmp_path / "bin" / "tinker-server"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tinker_server "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    in_image = {"PATH": path, "PYTHONPATH": str(ROOT), "TINKER_SERVER_DATA_DIR": str(tmp_path / "data")}

    def run(script: str, environment: Mapping[str, str], flags: str = "-ec") -> subprocess.CompletedProcess[str]:
        there = script.replace("/backups", str(tmp_path / "backups")).replace("/tmp/drill", str(tmp_path / "drill"))
        command = ["sh", flags, there]
        return subprocess.run(command, env={**in_image, **environment}, capture_output=True, text=True, timeout=120)

    return run


def test_the_pod_starts_in_the_environment_that_a_kubelet_makes(shell: Shell, tmp_path: Path) -> None:
    pod = manifest("Deployment", "tinker-server")["spec"]["template"]["spec"]
    (first_key,), (server,) = pod["initContainers"], pod["containers"]
    made = shell(first_key["command"][-1], injected(pod))
    assert made.returncode == 0, made.stderr
    own = {one["name"]: one["value"] for one in server["env"] if "value" in one}
    own |= {
        "TINKER_SERVER_DATABASE_URL": "",
        "TINKER_SERVER_PORT": "0",
        "TINKER_SERVER_DATA_DIR": str(tmp_path / "data"),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **IMAGE_ENVIRONMENT, **own, **injected(pod)}
    command = [sys.executable, "-c", SERVER_OF_FAKES, *server["args"]]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        url = started.stdout.readline()
        started.send_signal(signal.SIGTERM)
        _, log = started.communicate(timeout=30)
    assert "http://0.0.0.0:" in url and started.returncode == 0, log


def test_with_service_links_every_command_says_what_to_change(shell: Shell) -> None:
    assert service_links()["TINKER_SERVER_PORT"] == "tcp://10.0.0.1:8000"
    refused = shell("tinker-server keys list", service_links())
    assert refused.returncode == 2 and "set `enableServiceLinks: false`" in refused.stderr
    assert refused.stderr.count("\n") == 1, refused.stderr


@pytest.fixture(params=["sqlite", "postgresql"])
def two_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """One that is used, and an empty one of the same kind."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path}/data/tinker-server.db", f"sqlite+aiosqlite:///{tmp_path}/drill/other.db"
        return
    with fresh_database("postgresql", tmp_path / "a") as one, fresh_database("postgresql", tmp_path / "b") as two:
        yield one, two


def scheduled() -> dict[str, tuple[str, str]]:
    """The scripts of all schedules, each for one night, and the flags that their shell gets."""
    job = manifest("CronJob", "tinker-backup")["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    loop = COMPOSE["services"]["backup"]["command"][0].replace("$$", "$")
    (night,) = re.findall(r"; do\n(.*)done", loop, re.DOTALL)
    unit = (ROOT / "deploy/tinker-server-backup.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    _, service_flags, service = shlex.split(start.replace("$$", "$").replace("%%", "%"))
    service = service.replace("/var/lib/tinker-server-backups", "/backups").replace("/opt/tinker-server/bin/", "")
    return {
        "kubernetes": (job["command"][2], job["command"][1]),
        "compose": (night, COMPOSE["services"]["backup"]["entrypoint"][1]),
        "systemd": (service, service_flags),
    }


@pytest.mark.parametrize("schedule", ["kubernetes", "compose", "systemd"])
def test_a_scheduled_backup_keeps_seven_and_the_drill_restores_the_newest(
    schedule: str, two_databases: tuple[str, str], shell: Shell, tmp_path: Path
) -> None:
    used, empty = two_databases
    server = Running(tmp_path / "data", database_url=used)
    try:
        model_id = server.model()
        server.result(server.post("/save_weights", model_id=model_id, seq_id=1, path="kept"))
    finally:
        server.stop()
    old = [tmp_path / "backups" / f"2026-01-{day:02}-031700" for day in range(1, 10)]
    for one in old:
        one.mkdir()
    script, flags = scheduled()[schedule]
    made = shell(script, {"TINKER_SERVER_DATABASE_URL": used}, flags)
    assert made.returncode == 0, made.stderr
    *kept, newest = sorted((tmp_path / "backups").iterdir())
    assert kept == old[3:] and (newest / "backup.json").is_file()

    guide = (ROOT / "docs/operating.md").read_text()
    (drill,) = re.findall(r"--entrypoint sh backup -ec '\n(.*?)'\n", guide, re.DOTALL)
    drilled = shell(re.sub(r'"\$\{TINKER_SERVER_DATABASE_URL.*?"', shlex.quote(empty), drill), {})
    assert drilled.returncode == 0, drilled.stderr
    assert "Restored from" in drilled.stdout
    assert "2 weight directories" in drilled.stdout  # the snapshot is one
    assert len(list((tmp_path / "drill/checkpoints").glob("*/weights/kept~*"))) == 1


def test_a_failed_backup_deletes_no_older_one(shell: Shell, tmp_path: Path) -> None:
    for day in range(1, 10):
        (tmp_path / "backups" / f"2026-01-{day:02}-031700").mkdir()
    for script, flags in scheduled().values():
        shell(script, {"TINKER_SERVER_DATA_DIR": str(tmp_path / "missing")}, flags)
        assert len(list((tmp_path / "backups").iterdir())) == 9
