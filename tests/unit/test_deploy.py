"""Files of `deploy/` are valid: settings exist, commands are understood, ports and paths agree."""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import promql_parser
import pytest
import yaml
from pydantic import BaseModel
from sqlalchemy.engine import make_url

from tests.fake_server import Running
from tinker_server.command_line import parse, read_settings
from tinker_server.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.31"
IMAGE = "tinker-server:" + tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
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
    assert set(services) == {"server", "backup", "postgres", "prometheus", "grafana"}
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


def test_every_manifest_obeys_the_schema_of_kubernetes() -> None:
    for one in loaded("kubernetes.yaml"):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def pods() -> Iterator[tuple[str, Any]]:
    for one in loaded("kubernetes.yaml"):
        spec = one["spec"].get("jobTemplate", one).get("spec", {})
        if "template" in spec:
            yield one["metadata"]["name"], spec["template"]["spec"]


def test_pods_are_confined_bounded_and_pull_no_image_that_no_registry_has() -> None:
    assert [name for name, _ in pods()] == ["tinker-postgres", "tinker-server", "tinker-backup"]
    for name, pod in pods():
        assert pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"]
            assert container["imagePullPolicy"] == "IfNotPresent" and ":" in container["image"]
        if name != "tinker-backup":
            assert pod["containers"][0]["readinessProbe"]


def test_services_of_compose_are_bounded_in_memory_and_logs() -> None:
    (compose,) = loaded("compose.yaml")
    for name, service in compose["services"].items():
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service["logging"]["options"]["max-size"], name
        if service["image"] == IMAGE:
            assert (service["pull_policy"], service["cap_drop"]) == ("never", ["ALL"])


def test_all_files_name_this_version_of_the_image_and_one_version_of_postgresql() -> None:
    texts = {path: path.read_text() for path in [*FILES, ROOT / "Dockerfile", ROOT / "docs/operating.md"]}
    named = {(path.name, tag) for path, text in texts.items() for tag in re.findall(r"tinker-server:(\d[\w.]*)", text)}
    assert {tag for _, tag in named} == {IMAGE.partition(":")[2]}
    assert {name for name, _ in named} >= {"compose.yaml", "kubernetes.yaml", "Dockerfile"}
    versions = {tag for text in texts.values() for tag in re.findall(r"\bpostgres(?:ql-client)?[:-](\d+)", text)}
    assert versions == {"17"}


def test_the_images_context_has_what_its_steps_read() -> None:
    """Each file of the repository that the set-up script names, for the CPU too, and every package's files."""
    rules = [rule for rule in (ROOT / ".dockerignore").read_text().splitlines() if rule and not rule.startswith("#")]

    def is_sent(name: str) -> bool:
        paths = [name, *map(str, Path(name).parents)]
        found = [rule for rule in rules if any(fnmatch(path, rule.strip("!/")) for path in paths)]
        return bool(found) and found[-1].startswith("!")

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    read = set(re.findall(r"\.ci/\w+\.\w+", (ROOT / ".ci/install.sh").read_text())) | {"pyproject.toml", "LICENSE"}
    assert ".ci/torchvision_shim.py" in read and {name for name in read if not is_sent(name)} == set()
    packages = tuple(f"{name}/" for name in ("api_schemas", "backends", "migrations", "tinker_server"))
    assert {name for name in listed if is_sent(name)} - read == {name for name in listed if name.startswith(packages)}


def test_alerts_are_prometheus_and_about_metrics_that_the_server_has(tmp_path: Path) -> None:
    (prometheus,), (alerts,) = loaded("prometheus.yml"), loaded("alerts.yml")
    (compose,) = loaded("compose.yaml")
    mounts = compose["services"]["prometheus"]["volumes"]
    assert prometheus["rule_files"] == ["/etc/prometheus/alerts.yml"]
    assert "./alerts.yml:/etc/prometheus/alerts.yml:ro" in mounts
    server = Running(tmp_path / "data")
    try:
        server.model()
        told = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "tml-test"}).text
    finally:
        server.stop()
    families = {"tinker_operations_ended_total"}  # labels are not there before the first operation
    families |= set(re.findall(r"^(\w+)", told, re.MULTILINE)) | set(re.findall(r"# TYPE (\w+)", told)) | {"up"}
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len(rules) == len({rule["alert"] for rule in rules}) >= 8
    for rule in rules:
        promql_parser.parse(rule["expr"])
        assert set(re.findall(r"\b(tinker_\w+|up)\b", rule["expr"])) <= families, rule["alert"]
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_fault_in_its_units_but_programs_that_are_not_installed_here() -> None:
    units = sorted(str(path) for path in FILES if path.suffix in (".service", ".timer"))
    assert len(units) == 3
    checked = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    faults = [line for line in checked.stderr.splitlines() if "tinker-server" in line]
    assert [line for line in faults if not line.endswith("is not executable: No such file or directory")] == []
