"""A Ray cluster that was there before the server: its nodes join by themselves, and no others may."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.cluster.machines import Machine, NoUse, address_of, free_port, is_alive, started, until
from tests.servers import MODEL
from tinker_server.backends.cluster import client
from tinker_server.backends.cluster.client import Cluster, ExistingRay
from tinker_server.backends.cluster.join import leave
from tinker_server.backends.cluster.ray_commands import ray_environment, ray_running
from tinker_server.backends.cluster.token import make_token
from tinker_server.backends.processes.guarded import Guarded
from tinker_server.backends.protocol import BackendFailed

pytestmark = pytest.mark.slow
shares_nodes = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Nodes:
    """A Ray cluster of two nodes, as an operator starts it."""

    address: str
    worker: Guarded
    directory: Path

    def existing(self) -> ExistingRay:
        return ExistingRay(self.address, self.directory / "nodes")


@asynccontextmanager
async def of_two(directory: Path, env: dict[str, str]) -> AsyncIterator[Nodes]:
    address = f"127.0.0.1:{free_port()}"
    head = ["--head", "--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2]]
    head += ["--include-dashboard", "false", "--ray-client-server-port", str(free_port())]
    async with (
        ray_running(head, env),
        ray_running(["--address", address, "--node-name", "b"], env | {"CUDA_VISIBLE_DEVICES": "4,5"}) as worker,
    ):
        yield Nodes(address, worker, directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(temporary_of_file: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    directory = tmp_path_factory.mktemp("nodes")
    make_token(directory / "ray-token")
    env = ray_environment(directory / "ray-token")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        async with of_two(directory, env) as nodes:
            for name, value in env.items():
                patch.setenv(name, value)
            yield nodes


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: Nodes) -> AsyncIterator[Nodes]:
    """None belongs to a server, before each test and after it."""
    yield running
    await until(lambda: not members(running))


@shares_nodes
async def test_nodes_of_a_cluster_that_exists_join_by_themselves(nodes: Nodes, tiny_vl: Path, tmp_path: Path) -> None:
    async with started(tmp_path, NoUse(), models={MODEL: str(tiny_vl)}, existing=nodes.existing()) as cluster:
        await until(lambda: is_alive(cluster, "b"))
        assert [node.name for node in cluster.states()] == ["b"]  # and not the serving machine
        offer = cluster.nodes["b"].offer
        assert Path(offer.data_dir) == nodes.directory / "nodes/b"
        assert offer.environment["CUDA_VISIBLE_DEVICES"] == "4,5"
        assert offer.environment["OMP_NUM_THREADS"] is None  # Ray sets it to 1
        code, said = await (await Machine(address_of(cluster), cluster.token_file, "c", tiny_vl).start()).ended()
        assert code == 2 and f"it uses the Ray cluster at {nodes.address}, whose machines join by themselves" in said
        [member] = members(nodes)
        member.kill()
        await until(lambda: not is_alive(cluster, "b"))
        await until(lambda: is_alive(cluster, "b"))  # invited again
        await killed_head(cluster)
        await until(lambda: is_alive(cluster, "b"))
        await leave(address_of(cluster), cluster.token_file, "b")
        await until(lambda: cluster.states() == [])


def members(nodes: Nodes) -> list[psutil.Process]:
    """Those of the processes of the worker's Ray, which lead no session of their own, that belong to a server."""
    found = psutil.process_iter(["cmdline"])
    named = [one for one in found if "Member.belong" in " ".join(one.info["cmdline"] or ())]
    return [one for one in named if os.getsid(one.pid) == nodes.worker.pid]


async def killed_head(cluster: Cluster) -> None:
    [head] = cluster.processes()
    psutil.Process(head.pid).kill()
    await until(lambda: not is_alive(cluster, "b"))


@shares_nodes
async def test_a_node_of_another_version_is_named(
    nodes: Nodes, tiny_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "versions", lambda: {"tinker-server": "99"})
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "retrying in 1 s" in said

    async with started(tmp_path, NoUse(), models={MODEL: str(tiny_vl)}, existing=nodes.existing()) as cluster:
        await until(is_said)
        assert cluster.states() == []
    assert "the machine b: the server at" in said and "the server has 99: install the same" in said


@shares_nodes
async def test_a_cluster_without_the_right_token_is_refused(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    make_token(tmp_path / "other")
    with pytest.raises(BackendFailed, match=r"does not take this machine: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"):
        async with started(tmp_path, NoUse(), existing=nodes.existing()):
            pass


async def test_a_cluster_that_takes_everybody_is_refused(
    temporary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ray_environment(tmp_path):
        monkeypatch.delenv(name, raising=False)  # that of the nodes above
    async with of_two(tmp_path, {"RAY_AUTH_MODE": "disabled", "RAY_usage_stats_enabled": "0"}) as nodes:
        with pytest.raises(BackendFailed, match="takes everybody: start it with RAY_AUTH_MODE=token"):
            async with started(tmp_path, NoUse(), existing=nodes.existing()):
                pass


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "local", "10.0.0.1"])
def test_an_address_that_names_no_head_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=f"RAY_ADDRESS={address}: a Ray cluster is used by HOST:PORT of its head"):
        ExistingRay(address, tmp_path)
