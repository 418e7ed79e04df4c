"""A request that ends the whole server is not tried at every start. A crash is a copy of a running server's disk."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.fakes import FakeSampler, FakeTrainer
from tests.submitting import Client, server
from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends.protocol import EncodedBatch, LoadedModel, SamplingTask
from tinker_server.errors import Superseded
from tinker_server.models.crash_isolation import LeftOperations
from tinker_server.store.database import Database
from tinker_server.store.futures.records import Operation
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.futures.store import FutureStore

DEADLY = "deadly"


class Deaths:
    """The point at which the work of all servers halts: each is abandoned there, as if it had ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.is_deadly = True
        forward_backward, sample = FakeTrainer.forward_backward, FakeSampler.sample

        async def halting(trainer: FakeTrainer, model: LoadedModel, batch: EncodedBatch, *, backward: bool) -> object:
            if DEADLY.encode() in batch.body:
                await self.halt(model.model_id)
            return await forward_backward(trainer, model, batch, backward=backward)

        async def halting_sample(sampler: FakeSampler, task: SamplingTask) -> SampleResponse:
            await self.halt("sample")
            return await sample(sampler, task)

        monkeypatch.setattr(FakeTrainer, "forward_backward", halting)
        monkeypatch.setattr(FakeSampler, "sample", halting_sample)

    async def halt(self, name: str) -> None:
        self.begun.append(name)
        if self.is_deadly:
            await asyncio.Event().wait()

    async def crash(self, data_dir: Path, begun: int) -> Path:
        """Once so many have begun: the disk as it is."""
        async with asyncio.timeout(10):
            while len(self.begun) < begun:  # noqa: ASYNC110 - fakes tell of nothing
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # no others begin
        assert len(self.begun) == begun
        self.begun.clear()
        left = data_dir.with_name(f"after {data_dir.name}")
        shutil.copytree(data_dir, left)
        return left


async def two_models(client: Client) -> list[str]:
    for number in range(2):
        await client.result(await client.create_model(number))
    return [f"{client.session_id}:train:{number}" for number in range(2)]


async def test_an_operation_at_which_two_servers_ended_fails_by_name_and_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = Deaths(monkeypatch)
    async with server(tmp_path / "data") as before:
        names = await two_models(before)
        beside = [await before.forward_backward(1, DEADLY, name) for name in names]
        beside.append(await before.sample())
        left = await deaths.crash(tmp_path / "data", 3)
    async with server(left):
        left = await deaths.crash(left, 3)
    async with server(left):  # one at a time now
        left = await deaths.crash(left, 1)
    deaths.is_deadly = False
    async with server(left) as after:
        results = [await after.result(request_id) for request_id in beside]
        assert [one.failed for one in results].count(True) == 1
        (failed,) = [one for one in results if one.failed]
        assert b"the server ended 2 times" in failed.body and failed.failure_category == "server"
        for name, result in zip(names, results, strict=False):
            assert (await after.result(await after.optim_step(2, name))).failed == result.failed, "its gradient is gone"
            assert not (await after.result(await after.forward_backward(3, model_id=name))).failed


async def test_of_many_fewer_are_begun_at_once_with_every_end_until_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = Deaths(monkeypatch)
    async with server(tmp_path / "data") as before:
        samples = [await before.sample(number) for number in range(20)]
        left = await deaths.crash(tmp_path / "data", 20)
    for begun_at_once in (20, 3, 1):
        async with server(left):
            left = await deaths.crash(left, begun_at_once)
    deaths.is_deadly = False
    async with server(left) as after:
        results = [await after.result(request_id) for request_id in samples]
    assert [one.failed for one in results].count(True) == 1


async def test_a_server_that_stops_suspects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = Deaths(monkeypatch)
    async with server(tmp_path / "data") as before:
        await two_models(before)
        request_id = await before.forward_backward(1, DEADLY)
        left = await deaths.crash(tmp_path / "data", 1)
    for _ in range(3):
        async with server(left):
            while not deaths.begun:  # noqa: ASYNC110 - fakes tell of nothing
                await asyncio.sleep(0.01)
            deaths.begun.clear()
    deaths.is_deadly = False
    async with server(left) as after:
        assert not (await after.result(request_id)).failed


async def test_a_server_whose_database_was_taken_begins_nothing_that_was_left() -> None:
    class Taken(FutureRows):
        async def note_try(self, request_id: str, number: int) -> None:
            raise Superseded("another server has taken the database")

    db = Database("sqlite+aiosqlite://")
    futures = FutureStore(db, 0)
    futures.rows = Taken(db)
    operations = LeftOperations(futures)
    left = Operation("forward_backward", "model", 1, b"", "", "alice", request_id="a", accepted_at=0.0, tries=0)
    operations.isolate([left])
    with pytest.raises(Superseded):
        async with operations.attempt(left):
            pytest.fail("it was begun")
