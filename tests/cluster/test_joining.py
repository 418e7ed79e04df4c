"""Machines join a cluster, leave it, and come back, with a real Ray beneath each."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.machines import Machine, NoUse, address_of, is_alive, joined, kill, rays, started, until
from tinker_server.backends.cluster import client
from tinker_server.backends.cluster.client import Cluster
from tinker_server.backends.cluster.join import leave

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(temporary_of_file: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with started(tmp_path_factory.mktemp("cluster"), NoUse()) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: Cluster) -> AsyncIterator[Cluster]:
    """It has no machine and no Ray but its own, before each test and after it."""
    alone = len(rays())
    yield running
    for node in running.states():  # it may be lost
        await leave(address_of(running), running.token_file, node.name)
    await until(lambda: running.states() == [] and len(rays()) == alone)


async def test_a_machine_joins_and_leaves_when_it_is_interrupted(cluster: Cluster, tiny_vl: Path) -> None:
    before = rays()
    assert before
    async with joined(cluster, "a", tiny_vl) as machine:
        await until(lambda: len(rays()) > len(before))
        code, said = await machine.stop()
    assert code == 130, said
    await until(lambda: cluster.states() == [])
    await until(lambda: rays() == before)


async def test_no_other_user_reaches_the_sockets_of_ray(cluster: Cluster, temporary_of_file: str) -> None:
    temporary = Path(temporary_of_file)
    sockets = await asyncio.to_thread(lambda: [path.resolve() for path in temporary.rglob("plasma_store")])
    assert sockets
    for path in sockets:
        above = [folder for folder in path.parents if temporary in folder.parents]
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in above), above


async def test_a_machine_leaves_when_it_is_told_to(cluster: Cluster, tiny_vl: Path) -> None:
    async with joined(cluster, "a", tiny_vl) as machine:
        await leave(address_of(cluster), cluster.token_file, "a")
        code, said = await machine.ended()
    assert code == 0, said
    assert cluster.states() == []


async def test_a_machine_that_is_killed_is_lost_and_may_come_back(cluster: Cluster, tiny_vl: Path) -> None:
    before = rays()
    async with joined(cluster, "a", tiny_vl) as machine:
        await until(lambda: len(rays()) > len(before))
        kill(machine.process.pid)
        await until(lambda: not is_alive(cluster, "a"))
        assert [node.name for node in cluster.states()] == ["a"]
        await until(lambda: rays() == before)  # its Ray ends with it
    async with joined(cluster, "a", tiny_vl):
        pass


async def test_a_machine_comes_back_by_itself_when_the_head_is_started_again(cluster: Cluster, tiny_vl: Path) -> None:
    async with joined(cluster, "a", tiny_vl):
        [head] = cluster.processes()
        kill(head.pid)
        await until(lambda: not is_alive(cluster, "a"))
        await until(lambda: is_alive(cluster, "a"))
        [again] = cluster.processes()
        assert again.is_alive and again.pid != head.pid and again.restarts > head.restarts


async def test_what_does_not_belong_is_refused_before_ray_starts(
    cluster: Cluster, tiny_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rays()
    wrong, open_to_all = tmp_path / "wrong", tmp_path / "open"
    wrong.write_text("ab" * 32)
    wrong.chmod(0o600)
    open_to_all.write_text(cluster.token_file.read_text())
    open_to_all.chmod(0o644)

    async def refusal(token_file: Path, name: str = "b", address: str = address_of(cluster)) -> str:
        code, said = await (await Machine(address, token_file, name, tiny_vl).start()).ended()
        assert code == 2
        return said

    of_wrong, of_missing, of_open = await asyncio.gather(*map(refusal, (wrong, tmp_path / "missing", open_to_all)))
    assert "has another token: copy its token file here again" in of_wrong
    assert "cannot be read: No such file" in of_missing
    assert f"others may read the token file {open_to_all}" in of_open
    async with joined(cluster, "a", tiny_vl):
        said = await refusal(cluster.token_file, "a")
        assert "a machine of the name a is there already" in said
    monkeypatch.setattr(client, "versions", lambda: {"Python": "3.9", "Ray": "2.60.0"})
    said = await refusal(cluster.token_file)
    assert "this machine has Python 3.1" in said and "the server has 3.9: install the same" in said
    assert "Ray" not in said
    await until(lambda: rays() == before)
