"""Files of `deploy/` are valid: settings exist, commands are understood, ports and paths agree."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from sqlalchemy.engine import make_url

from tinker_server.command_line import parse, read_settings
from tinker_server.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def names(model: type[BaseModel], prefix: str = "TINKER_SERVER_") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from names(field.annotation, f"{prefix}{name.upper()}__")
        else:
            yield prefix + name.upper()


def loaded(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_setting_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"TINKER_SERVER_[A-Z_]*[A-Z]", path.read_text()))
    assert named <= set(names(Settings))
    if path.suffix in (".yaml", ".yml"):
        assert list(yaml.safe_load_all(path.read_text()))


def test_compose_is_whole() -> None:
    (compose,) = loaded("compose.yaml")
    services = compose["services"]
    assert set(services) == {"server", "postgres", "prometheus", "grafana"}
    for service in services.values():
        assert ("image" in service) and set(service.get("depends_on", {})) <= set(services)
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./") and source != "./prometheus-key":
                assert (DEPLOY / source).exists(), source
            elif not source.startswith((".", "$")):
                assert source in compose["volumes"]
    server = services["server"]
    assert (ROOT / "Dockerfile").is_file() and (DEPLOY / server["build"]).resolve() == ROOT
    understood(server["command"])
    check_database(server["environment"]["TINKER_SERVER_DATABASE_URL"], "postgres", services)
    drain_s = float(server["environment"]["TINKER_SERVER_DRAIN_S"])
    assert float(server["stop_grace_period"].removesuffix("s")) > 2 * drain_s
    (prometheus,) = loaded("prometheus.yml")
    (job,) = prometheus["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == ["server:8000"]


def test_the_kubernetes_manifests_are_whole() -> None:
    manifests = {(one["kind"], one["metadata"]["name"]): one for one in loaded("kubernetes.yaml")}
    pod = manifests["Deployment", "tinker-server"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    understood(server["args"])
    values = {one["name"]: one.get("value", "") for one in server["env"]}
    check_database(values["TINKER_SERVER_DATABASE_URL"], "tinker-postgres", {name for _, name in manifests})
    assert {mount["name"] for mount in server["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert server["livenessProbe"]["httpGet"] == {"path": "/api/v1/healthz", "port": 8000}
    assert pod["terminationGracePeriodSeconds"] > 2 * float(values["TINKER_SERVER_DRAIN_S"])
    for (kind, name), one in manifests.items():
        if kind == "Service":
            assert any(other == ("Deployment", name) or other == ("StatefulSet", name) for other in manifests)
        if kind in ("Deployment", "StatefulSet"):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"] == labels


def test_the_systemd_unit_starts_what_there_is() -> None:
    unit = (DEPLOY / "tinker-server.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *arguments = shlex.split(start)
    assert program.endswith("/tinker-server")
    assert parse(arguments).model == ["Qwen/Qwen3-VL-4B-Instruct=/models/Qwen3-VL-4B-Instruct"]
    drain_s = float(re.findall(r"TINKER_SERVER_DRAIN_S=(\d+)", unit)[0])
    assert float(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > 2 * drain_s


def understood(command: list[str]) -> None:
    """As the container runs it, with compose's default values."""
    plain = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in command]
    assert read_settings(parse(plain)).backend.models


def check_database(address: str, host: str, hosts: Any) -> None:
    url = make_url(re.sub(r"\$\{\w+:\?\}|\$\(\w+\)", "secret", address))
    assert (url.drivername, url.host, url.password) == ("postgresql+asyncpg", host, "secret") and host in hosts
