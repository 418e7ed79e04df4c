"""Files of `deploy/` are valid: settings exist, commands are understood, ports and paths agree."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
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
from tinker_server.__main__ import may_pass
from tinker_server.backends.protocol import BackendFailed, Unavailable
from tinker_server.command_line import parse, read_settings
from tinker_server.errors import DatabaseUnavailable, StartDelayed, StartFailed, Superseded
from tinker_server.release import Release, find
from tinker_server.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.31"
SHELL = {"MODEL": "a/b=org/name", "RAY_ADDRESS": "10.0.0.1:6379", "head": "10.0.0.1", "SLURM_JOB_NUM_NODES": "2"}
"""Values for variables of the scripts' commands."""
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = "tinker-server:${TAG:?}"
"""The image in compose; `.env` has the tag."""
RAY = PROJECT["optional-dependencies"]["cluster"][0].removeprefix("ray==").removesuffix(".*")
DOCKERFILE = (ROOT / "Dockerfile").read_text()
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
        assert list(yaml.load_all(path.read_text(), Overriding))


def test_compose_is_whole() -> None:
    (compose,) = loaded("compose.yaml")
    services = compose["services"]
    assert set(services) == {"server", "backup", "postgres", "prometheus", "alertmanager", "grafana"}
    for service in services.values():
        assert ("image" in service) and set(service.get("depends_on", {})) <= set(services)
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./") and source != "./prometheus-key":
                assert (DEPLOY / source).exists(), source
            elif not source.startswith((".", "$")):
                assert source in compose["volumes"]
    server = services["server"]
    assert (ROOT / "Dockerfile").is_file() and (DEPLOY / server["build"]["context"]).resolve() == ROOT
    understood(server["command"])
    check_database(server["environment"]["TINKER_SERVER_DATABASE_URL"], "postgres", services)
    drain_s = float(server["environment"]["TINKER_SERVER_DRAIN_S"])
    assert float(server["stop_grace_period"].removesuffix("s")) > 2 * drain_s
    (prometheus,) = loaded("prometheus.yml")
    (sent_to,) = prometheus["alerting"]["alertmanagers"][0]["static_configs"]
    assert sent_to["targets"] == ["alertmanager:9093"]
    (job,) = prometheus["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == ["server:8000"]


def test_alerts_go_to_a_receiver_that_the_alertmanager_has() -> None:
    (config,) = loaded("alertmanager.yml")
    receivers = {receiver["name"] for receiver in config["receivers"]}
    routes = [config["route"], *config["route"]["routes"]]
    assert {route["receiver"] for route in routes} <= receivers
    named = {alert["alert"]: alert["labels"]["severity"] for alert in loaded("alerts.yml")[0]["groups"][0]["rules"]}
    matched = re.findall(r'(alertname|severity)="(\w+)"', (DEPLOY / "alertmanager.yml").read_text())
    assert {value for _, value in matched} <= named.keys() | set(named.values()) and len(matched) == 3


class Overriding(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
    """Reads compose's `!reset`, which takes a value away."""


Overriding.add_constructor("!reset", lambda loader, node: None)


def test_without_gpus_compose_reserves_none_and_takes_the_image_for_a_cpu() -> None:
    services = yaml.load((DEPLOY / "compose.cpu.yaml").read_text(), Overriding)["services"]
    (compose,) = loaded("compose.yaml")
    of_image = {name for name, service in compose["services"].items() if service["image"] == IMAGE}
    assert services.keys() == of_image and {service["image"] for service in services.values()} == {f"{IMAGE}-cpu"}
    assert services["server"]["build"]["args"] == {"EXTRA": "cpu"}
    assert services["server"]["deploy"]["resources"] == {"reservations": None}
    reserved = [name for name in compose["services"] if "nvidia" in str(compose["services"][name])]
    assert reserved == ["server"]


def test_a_token_of_the_hub_reaches_the_server_by_compose_kubernetes_and_systemd() -> None:
    (compose,) = loaded("compose.yaml")
    assert compose["services"]["server"]["environment"]["HF_TOKEN"] == "${HF_TOKEN:-}"
    assert "HF_TOKEN" not in compose["services"]["backup"]["environment"]
    (deployment,) = [manifest for manifest in loaded("kubernetes.yaml") if manifest["kind"] == "Deployment"]
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    (token,) = [variable for variable in server["env"] if variable["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert "\nEnvironmentFile=-/etc/tinker-server.env\n" in (DEPLOY / "tinker-server.service").read_text()


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


def test_the_unit_starts_a_server_again_whose_failure_may_pass() -> None:
    unit = (DEPLOY / "tinker-server.service").read_text().splitlines()
    assert "Restart=on-failure" in unit and "RestartPreventExitStatus=2" in unit
    assert may_pass(StartDelayed("")) and may_pass(Unavailable("")) and may_pass(DatabaseUnavailable(""))
    assert not any(map(may_pass, (StartFailed(""), BackendFailed(""), Superseded(""))))
    assert os.EX_TEMPFAIL != 2


@pytest.mark.parametrize(("extra", "suffix"), [("gpu", ""), ("cpu", "-cpu")])
def test_the_image_is_built_with_version_and_commit_in_its_tag(extra: str, suffix: str, tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    found = find(ROOT)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    command = ["make", "--no-print-directory", "image", f"EXTRA={extra}"]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    words = built.stdout.splitlines()[-10:]
    assert words[0] == "build" and words[-3:] == ["--tag", f"tinker-server:{found.tag}{suffix}", "."]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given == {"EXTRA": extra, "VERSION": found.version, "COMMIT": found.commit}
    arguments = set(re.findall(r"(\w+)(?:=\S+)?", " ".join(re.findall(r"^ARG (.*)$", DOCKERFILE, re.MULTILINE))))
    assert given.keys() <= arguments


def test_the_image_writes_the_file_that_the_server_reads(tmp_path: Path) -> None:
    (command,) = re.findall(r"^RUN (.*build\.json)$", DOCKERFILE, re.MULTILINE)
    (tmp_path / "tinker_server").mkdir()
    given = {"VERSION": "1.2.3", "COMMIT": "abcdef012", "PATH": os.environ["PATH"]}
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=given, check=True)
    assert find(tmp_path) == Release("1.2.3", "abcdef012")


def test_every_manifest_obeys_the_schema_of_kubernetes() -> None:
    for one in loaded("kubernetes.yaml"):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def pods() -> Iterator[tuple[str, Any]]:
    for one in loaded("kubernetes.yaml"):
        spec = one["spec"].get("jobTemplate", one).get("spec", {})
        if "template" in spec:
            yield one["metadata"]["name"], spec["template"]["spec"]
    for one in loaded("kuberay.yaml"):
        for group in [one["spec"].get("headGroupSpec"), *one["spec"].get("workerGroupSpecs", [])]:
            if group is not None:
                yield group.get("groupName", "head"), group["template"]["spec"]


def test_pods_are_confined_bounded_and_pull_no_image_that_no_registry_has() -> None:
    assert [name for name, _ in pods()] == ["tinker-postgres", "tinker-server", "tinker-backup", "head", "engines"]
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


def test_no_file_names_a_tag_of_the_image_that_a_later_build_would_take() -> None:
    """Each has the tag of `release.py`, with version and commit: by `.env`, or put in by sed."""
    texts = {path: path.read_text() for path in [*FILES, ROOT / "Dockerfile", ROOT / "docs/operating.md"]}
    named = {
        (path.name, tag) for path, text in texts.items() for tag in re.findall(r"image: tinker-server:(\S+)", text)
    }
    in_compose = {("compose.yaml", "${TAG:?}"), ("compose.cpu.yaml", "${TAG:?}-cpu")}
    assert named == in_compose | {("kubernetes.yaml", "TAG"), ("kuberay.yaml", "TAG")}
    assert not [path for path, text in texts.items() if re.search(r"tinker-server:(\d|latest)", text)]
    for name in ("kubernetes.yaml", "kuberay.yaml"):
        assert f'sed "s/tinker-server:TAG/tinker-server:$TAG/" deploy/{name} | kubectl' in (DEPLOY / name).read_text()


def test_one_version_of_postgresql_is_named() -> None:
    texts = {path: path.read_text() for path in [*FILES, ROOT / "Dockerfile", ROOT / "docs/operating.md"]}
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
    read = set(re.findall(r"\.ci/\w+\.\w+", (ROOT / ".ci/install.sh").read_text())) | {
        *("pyproject.toml", "setup.py", "LICENSE", "README.md", "CHANGELOG.md")
    }
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


def commands_of(program: str, text: str) -> list[list[str]]:
    """The arguments of each call of a program in a script, its variables replaced."""
    whole = "\n".join(line for line in text.replace("\\\n", " ").splitlines() if not line.strip().startswith("#"))
    found = re.findall(rf"\b{program} ((?:serve|start|symmetric-run) [^;|&>#\n]*)", whole)
    return [shlex.split(re.sub(r"\$\{?(\w+)(%:\*)?\}?", lambda match: SHELL[match[1]], one)) for one in found]


def check_rays(command: list[str]) -> None:
    """That Ray's own command line takes it."""
    name, *arguments = command
    scripts = import_module("ray.scripts.scripts")
    if name == "symmetric-run":
        own, _, serving = " ".join(arguments).partition(" -- ")
        (address_flag, _, nodes_flag, _, *arguments) = own.split()
        assert (address_flag, nodes_flag) == ("--address", "--min-nodes") and serving.startswith("tinker-server serve ")
        name, arguments = "start", ["--address", "10.0.0.1:6379", *arguments]  # as it passes them on
    scripts.cli.commands[name].make_context(name, arguments)


CLUSTERS = {"kuberay.yaml": 0, "slurm.sh": 1, "skypilot.yaml": 2}
"""Files that start a Ray cluster, with the number of Ray's commands in them."""


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.heavy
def test_every_command_in_the_files_for_clusters_is_one_that_there_is(name: str) -> None:
    text = (DEPLOY / name).read_text()
    [settings] = [read_settings(parse(one)) for one in commands_of("tinker-server", text)]
    assert settings.backend.cluster and settings.backend.models
    rays = commands_of("ray", text)
    assert len(rays) == CLUSTERS[name]
    for one in rays:
        check_rays(one)


def test_the_script_for_slurm_asks_for_a_task_on_each_node_and_keeps_its_token_private(tmp_path: Path) -> None:
    script = DEPLOY / "slurm.sh"
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH") and options["ntasks-per-node"] == "1" and int(options["nodes"]) > 1
    body = text.index("set -euo pipefail")
    assert max(match.start() for match in re.finditer("#SBATCH", text)) < body  # later ones are not read
    programs = tmp_path / "tinker-venv/bin"
    programs.mkdir(parents=True)
    for name, said in (("scontrol", "echo one; echo two"), ("getent", "echo '10.0.0.7 STREAM one'")):
        (programs / name).write_text(f"#!/bin/sh\n{said}\n")
    (programs / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    given = {"HOME": str(tmp_path), "MODEL": SHELL["MODEL"], "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "2"}
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | given
    ran = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    words = ran.stdout.splitlines()
    ours = words[words.index("--") + 1 :]
    assert ours[0] == "tinker-server" and read_settings(parse(ours[1:])).backend.cluster_address == "10.0.0.7"
    assert words[words.index("--address") + 1] == "10.0.0.7:6379"
    token = tmp_path / "tinker-data/ray-token"
    assert token.stat().st_mode & 0o077 == 0 and len(token.read_text()) == 64 and token.read_text() not in ran.stdout


def test_the_file_for_skypilot_has_fields_that_it_knows_and_no_secret() -> None:
    (task,) = loaded("skypilot.yaml")
    assert task.keys() <= {"name", "num_nodes", "resources", "workdir", "envs", "secrets", "setup", "run"}
    assert task["resources"].keys() <= {"accelerators", "disk_size"} and task["num_nodes"] > 1
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None} and task["envs"]["RAY_AUTH_MODE"] == "token"
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert read_settings(parse(["serve", "--model", task["envs"]["MODEL"]])).backend.models


@pytest.mark.heavy
def test_the_ray_cluster_of_kuberay_has_a_token_and_pods_that_kubernetes_takes() -> None:
    manifests = {one["kind"]: one for one in loaded("kuberay.yaml")}
    cluster = manifests.pop("RayCluster")
    for one in manifests.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    assert cluster["apiVersion"] == "ray.io/v1" and cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    assert cluster["spec"]["rayVersion"].rpartition(".")[0] == RAY
    head, workers = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    for group in (head, *workers):
        pod = group["template"]["spec"]
        known = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        kubernetes_validate.validate(known, KUBERNETES, strict=True)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        flags = [f"--{name}={value}".removesuffix("=true") for name, value in group["rayStartParams"].items()]
        check_rays(["start", *flags])
        main = pod["containers"][0]
        assert "$KUBERAY_GEN_RAY_START_CMD" in main["args"][0] and main["livenessProbe"] and main["readinessProbe"]
        assert {mount["name"] for mount in main["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert head["rayStartParams"]["num-gpus"] == "0"  # the server uses them without asking Ray
    labels = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
    assert manifests["Service"]["spec"]["selector"] == labels
    own, everybody = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert "ports" not in own and everybody == {"ports": [{"port": 8000}]}


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", ["tinker-server.service", "tinker-server-backup.service"])
def test_the_units_are_hardened_as_far_as_gpus_and_compiled_kernels_allow(unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", str(DEPLOY / unit)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    lines = (DEPLOY / unit).read_text().splitlines()
    assert not [line for line in lines if line.startswith(("MemoryDenyWriteExecute=", "ProcSubset="))]
    if unit == "tinker-server.service":
        assert "DeviceAllow=char-nvidia* rw" in lines and "PrivateDevices=yes" not in lines
