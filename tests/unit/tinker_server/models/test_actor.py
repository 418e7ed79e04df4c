"""The order in which a model's actor does what it is asked for, and what it leaves when the server stops."""

import asyncio
import time
from pathlib import Path

import pytest
from sqlalchemy import func, select

from tests.fakes import FakeTrainer
from tests.submitting import Client, server
from tinker_server.api_schemas.training import AdamParams, UnloadModelRequest
from tinker_server.backends.protocol import LoadedModel
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Result
from tinker_server.store.tables import Future


async def held(client: Client) -> str:
    """A model whose forward_backward 1 runs and does not end."""
    await client.result(await client.create_model())
    client.trainer.gates["hold"].clear()
    running = await client.forward_backward(1, "hold")
    await asyncio.sleep(0.05)
    return running


async def unload(client: Client, model_id: str) -> str:
    request = UnloadModelRequest(model_id=model_id)
    return await client.submit("unload_model", request, 0, model_id + UNLOAD_SUFFIX)


async def test_a_request_waits_for_the_operation_that_runs_and_goes_before_those_that_wait(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        running = await held(client)
        waiting = await client.forward_backward(2)
        suspending = asyncio.create_task(client.services.scheduler.suspend(client.model_id))
        await asyncio.sleep(0.05)
        assert not suspending.done() and client.model_id in client.trainer.steps
        client.trainer.gates["hold"].set()
        await suspending
        for request_id in (running, waiting):
            assert not (await client.result(request_id)).failed
        names = [name for name, _ in client.trainer.calls]
        assert names == ["create_model", "hold", "create_model", "loss 2"], "it was not restored in between"
        assert client.trainer.gradients[client.model_id] == [1, 1]


async def test_whoever_asks_gets_the_error_and_the_model_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw it")

    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        with monkeypatch.context() as patch:
            patch.setattr(client.trainer, "delete_model", broken)
            with pytest.raises(ZeroDivisionError):
                await client.services.scheduler.suspend(client.model_id)
        assert not (await client.result(await client.optim_step(1))).failed


async def test_an_unload_comes_behind_all_that_waits(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        running = await held(client)
        unloading = await unload(client, client.model_id)
        waiting = await client.optim_step(2)
        client.trainer.gates["hold"].set()
        for request_id in (running, waiting, unloading):
            assert not (await client.result(request_id)).failed
        assert client.model_id not in client.trainer.steps


async def test_a_model_is_dropped_once_its_last_result_is_stored(tmp_path: Path) -> None:
    """Stored later, the result would have a place in a log that has ended, and nobody would delete its body."""
    async with server(tmp_path) as client:
        running = await held(client)
        unloading = await unload(client, client.model_id)
        db = client.services.runs._db
        async with db._write_lock:  # as another commit has it
            client.services.futures.queue._results.put(("unknown", Result(b"{}", "application/json")))
            await asyncio.sleep(0.05)
            client.trainer.gates["hold"].set()
            await asyncio.sleep(0.1)
        for request_id in (running, unloading):
            assert not (await client.result(request_id)).failed
        async with db.read() as session:
            placed = select(func.count()).select_from(Future).where(Future.position.is_not(None))
            assert await session.scalar(placed) == 0


async def test_an_unload_that_waits_when_the_server_stops_takes_no_model_from_the_operations_before_it(
    tmp_path: Path,
) -> None:
    async with server(tmp_path, drain_s=5) as before:
        running = await held(before)
        waiting, unloading = await before.optim_step(2), await unload(before, before.model_id)
        asyncio.get_running_loop().call_later(0.05, before.trainer.gates["hold"].set)
    async with server(tmp_path) as after:
        for request_id in (running, waiting, unloading):
            result = await after.result(request_id)
            assert not result.failed, result.body


async def test_a_restoration_that_nobody_waits_for_does_not_delay_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(trainer: FakeTrainer, model: LoadedModel, adam: AdamParams) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with server(tmp_path, drain_s=30) as before:
        await before.result(await before.create_model())
        assert not (await before.result(await before.optim_step(1))).failed
        with monkeypatch.context() as patch:
            patch.setattr(FakeTrainer, "optim_step", endless)
            await before.trainer.die()
            await asyncio.wait_for(begun.wait(), 5)
            await asyncio.wait_for(before.services.drain(), 5)
    async with server(tmp_path) as after:
        assert not (await after.result(await after.optim_step(2, before.model_id))).failed
        assert after.trainer.steps[before.model_id] == 2


async def test_the_actor_of_an_unloaded_model_does_not_stay(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await client.result(await unload(client, client.model_id))
        assert client.model_id in client.services.scheduler._actors
        await client.services.housekeeper.sweep_models(time.time())
        assert client.model_id not in client.services.scheduler._actors
