"""The next server continues from the state that a crash leaves. A crash is a copy of the disk of a running server."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeTrainer
from tests.submitting import Client, server
from tinker_server.api_schemas.weights import LoadWeightsRequest
from tinker_server.backends.protocol import BackendFailed, LoadedModel, ProcessDied
from tinker_server.errors import DatabaseUnavailable
from tinker_server.settings import Settings
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.records import SamplingSession, TrainingRun
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore


def crash(data_dir: Path) -> Path:
    """Copy the disk as it is now to another directory."""
    copy = data_dir.with_name("after the crash")
    shutil.copytree(data_dir, copy)
    return copy


async def suspend(client: Client, model_id: str | None = None) -> None:
    await client.services.scheduler.suspend(model_id or client.model_id)


async def refuse(*_: object) -> None:
    raise DatabaseUnavailable("the database does not answer")


@contextlib.asynccontextmanager
async def server_with_model(*arguments: Any, **settings: Any) -> AsyncIterator[Client]:
    async with server(*arguments, **settings) as client:
        await client.result(await client.create_model())
        yield client


@contextlib.asynccontextmanager
async def server_with_gradient(*arguments: Any, **settings: Any) -> AsyncIterator[Client]:
    """The gradient is of forward_backward 1."""
    async with server_with_model(*arguments, **settings) as client:
        await client.result(await client.forward_backward(1))
        yield client


async def busy_trainer(client: Client) -> None:
    """Another model holds the trainer from here on."""
    await client.result(await client.create_model(9))
    client.trainer.gates["hold"].clear()
    await client.forward_backward(1, "hold", f"{client.session_id}:train:9")
    await asyncio.sleep(0.05)


def gradients(client: Client, model_id: str) -> Any:
    return client.trainer.gradients[model_id]


async def test_what_waits_for_a_suspended_model_is_done_after_a_crash(tmp_path: Path) -> None:
    async with server_with_gradient(tmp_path / "data") as before:
        await suspend(before)
        await busy_trainer(before)
        waiting = await before.forward_backward(2)
        left = crash(tmp_path / "data")
        before.trainer.gates["hold"].set()
    async with server(left) as after:
        assert not (await after.result(waiting)).failed
        assert len(gradients(after, before.model_id)) == 2
        assert not (await after.result(await after.optim_step(3, before.model_id))).failed


async def test_a_model_whose_creation_waits_is_created_after_a_crash_with_what_was_sent_to_it(tmp_path: Path) -> None:
    async with server(tmp_path / "data") as before:
        await busy_trainer(before)
        waiting = [await before.create_model(), await before.forward_backward(1)]
        left = crash(tmp_path / "data")
        before.trainer.gates["hold"].set()
    async with server(left) as after:
        for request_id in waiting:
            assert not (await after.result(request_id)).failed


async def test_a_model_whose_creation_was_not_answered_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path / "data") as before:
        with monkeypatch.context() as patch:
            patch.setattr(FutureRows, "finish", refuse)
            created = await before.create_model()
            assert await before.services.futures.wait(created, before.owner, 0.05) is None, "answered before stored"
            assert await before.services.runs.find(before.model_id) is not None
            left = crash(tmp_path / "data")
    async with server(left) as after:
        assert not (await after.result(created)).failed
        assert not (await after.result(await after.forward_backward(1, model_id=before.model_id))).failed


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_number_that_never_came_is_missing_from_the_gradient_of_a_suspended_model(
    tmp_path: Path, crashed: bool
) -> None:
    async with server_with_gradient(tmp_path / "data") as before:
        await suspend(before)
        left = crash(tmp_path / "data") if crashed else tmp_path / "data"
    async with server(left) as after:
        error = await after.error(await after.optim_step(3, before.model_id))
        assert "refused, or never came" in error["error"] and error["category"] == "user"
        await after.result(await after.forward_backward(4, model_id=before.model_id))
        assert not (await after.result(await after.optim_step(5, before.model_id))).failed


async def test_a_forward_backward_that_found_no_trainer_is_missing_from_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(*_: object) -> None:
        raise BackendFailed("the process of rank 0 has ended")

    async with server_with_gradient(tmp_path / "data") as before:
        await suspend(before)
        with monkeypatch.context() as patch:
            patch.setattr(before.trainer, "create_model", ended)
            await before.error(await before.forward_backward(2))
        left = crash(tmp_path / "data")
        error = await before.error(await before.optim_step(3))
        assert "forward_backward 2 failed" in error["error"] and error["category"] == "user"
    async with server(left) as after:
        error = await after.error(await after.optim_step(3, before.model_id))
        assert "forward_backward 2 failed" in error["error"] and error["category"] == "user"
        await after.result(await after.forward_backward(4, model_id=before.model_id))
        assert not (await after.result(await after.optim_step(5, before.model_id))).failed


async def test_what_leaves_the_gradient_alone_may_fail_or_be_refused(tmp_path: Path) -> None:
    async with server_with_gradient(tmp_path / "data") as client:
        await client.error(await client.forward(2, "wrong"))
        client.services.scheduler.refuse_number(client.model_id, 3, "save_weights")
        assert not (await client.result(await client.optim_step(4))).failed


async def test_idle_models_are_on_disk_when_the_server_has_stopped_and_what_waits_is_done_by_the_next(
    tmp_path: Path, database_url: str
) -> None:
    async with server_with_model(tmp_path / "data", database_url) as before:
        await before.result(await before.create_model(1))
        await before.result(await before.forward_backward(1))
        await busy_trainer(before)
        waiting = await before.forward_backward(2)
    async with server(tmp_path / "data", database_url) as after:
        assert not (await after.result(waiting)).failed
        assert len(gradients(after, before.model_id)) == 2
        assert not (await after.result(await after.optim_step(3, before.model_id))).failed
        other = f"{before.session_id}:train:1"
        assert not (await after.result(await after.forward_backward(1, model_id=other))).failed


async def test_a_stop_takes_no_longer_than_it_may_though_an_operation_goes_on(tmp_path: Path) -> None:
    async with server(tmp_path / "data") as before:
        await busy_trainer(before)
        started = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - started < 2


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.heavy
async def test_a_stop_with_a_command_that_cannot_be_cut_short_ends_before_docker_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's command runs to its end, and idle models wait behind it. The children's second is not in here."""
    ended = asyncio.Event()

    async def stubborn(self: FakeTrainer, model: LoadedModel, batch: object, *, backward: bool) -> None:
        async with self.queue.grant("", model.model_id):
            self.begin(model)
            while not ended.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await ended.wait()

    async def behind(self: FakeTrainer, model: LoadedModel, directory: Path) -> None:
        async with self.queue.grant("", model.model_id):
            pytest.fail("it is not granted")

    async with server_with_model(tmp_path, drain_s=Settings(data_dir=tmp_path).drain_s) as client:
        await client.result(await client.create_model(1))
        monkeypatch.setattr(FakeTrainer, "forward_backward", stubborn)
        monkeypatch.setattr(FakeTrainer, "snapshot", behind)
        await client.forward_backward(1)
        await asyncio.sleep(0.1)
        began = time.monotonic()
        asyncio.get_running_loop().call_later(25, ended.set)
        await client.services.drain()  # as the web server does, before all is closed
    took_s = time.monotonic() - began
    ended.set()
    await asyncio.sleep(0)
    assert took_s < 9, f"{took_s:.1f} s"


async def test_creating_a_model_where_one_lives_leaves_it_alone(tmp_path: Path) -> None:
    async with server_with_model(tmp_path / "data") as client:
        await client.result(await client.optim_step(1))
        rows = client.services.futures.rows
        await rows.expire(2**40, 2**40)  # the tombstone of its creation is gone
        client.services.scheduler.forget(client.model_id)
        error = await client.error(await client.create_model())
        assert "is in use" in error["error"] and error["category"] == "user"
        assert client.trainer.steps[client.model_id] == 1


async def test_a_save_whose_answer_was_not_stored_is_not_written_twice_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with_model(tmp_path / "data") as before:
        with monkeypatch.context() as patch:
            patch.setattr(FutureRows, "finish", refuse)
            saved = [await before.save(1, "a"), await before.save_unnamed(2)]
            assert await before.services.futures.wait(saved[1], before.owner, 0.5) is None
            left = crash(tmp_path / "data")
    async with server(left) as after:
        for request_id in saved:
            assert not (await after.result(request_id)).failed
    assert len(list(left.glob("checkpoints/*/*/a~*"))) == 1
    assert len(list(left.glob("checkpoints/*/*/2~*"))) == 1


async def test_no_snapshot_counts_before_the_results_that_it_holds_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with_gradient(tmp_path / "data") as before:
        with monkeypatch.context() as patch:
            patch.setattr(FutureRows, "finish", refuse)
            before.services.scheduler.actor(before.model_id).model.log.must_end = True
            submitted = [await before.forward_backward(2), await before.forward_backward(3)]
            await asyncio.sleep(0.5)
            assert list((tmp_path / "data").glob("checkpoints/*/snapshots/*~*")), "no snapshot was taken"
            left = crash(tmp_path / "data")
    async with server(left) as after:
        for request_id in submitted:
            assert not (await after.result(request_id)).failed
        assert len(gradients(after, before.model_id)) == 3
        assert not (await after.result(await after.optim_step(4, before.model_id))).failed


async def test_weights_that_were_loaded_outlive_their_checkpoint(tmp_path: Path) -> None:
    async with server_with_model(tmp_path / "data") as before:
        await before.result(await before.optim_step(1))
        path = json.loads((await before.result(await before.save(2, "a"))).body)["path"]
        await before.result(await before.load_as(1, path, optimizer=True))
        directory = await before.services.checkpoints.take(parse_path(path), before.owner)
        await before.services.storage.delete(directory)
        left = crash(tmp_path / "data")
    async with server(left) as after:
        stepped = await after.result(await after.optim_step(1, f"{before.session_id}:train:1"))
        assert json.loads(stepped.body)["metrics"]["step"] == 2


async def test_what_changes_the_last_bits_is_logged_when_a_model_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with server(tmp_path / "data", numerics={"torch": "1", "base_precision": "fp8"}) as before:
        await before.result(await before.create_model())
    async with server(tmp_path / "data", numerics={"torch": "2"}) as after:
        assert not (await after.result(await after.optim_step(1, before.model_id))).failed
    assert "torch was 1, is 2; base_precision was fp8, is None" in caplog.text


async def test_an_operation_waits_for_a_database_that_is_away_and_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, refusals = RunStore.get, 3

    async def refuse_some(self: RunStore, model_id: str) -> TrainingRun:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise DatabaseUnavailable("the database does not answer")
        return await get(self, model_id)

    async with server(tmp_path / "data") as before:
        await before.result(await before.create_model())
    async with server(tmp_path / "data") as client:
        monkeypatch.setattr(RunStore, "get", refuse_some)
        assert not (await client.result(await client.forward_backward(1, model_id=before.model_id))).failed
        assert refusals == 0 and gradients(client, before.model_id) == [1]


async def test_a_first_sample_runs_again_where_the_database_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 0 of a model's lane is its creation, which may have changed something. A sample has changed nothing."""
    async with server_with_model(tmp_path / "data") as client:
        refusals, get = 1, SamplerStore.get

        async def refuse_one(self: SamplerStore, sampling_session_id: str) -> SamplingSession:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise DatabaseUnavailable("the database does not answer")
            return await get(self, sampling_session_id)

        monkeypatch.setattr(SamplerStore, "get", refuse_one)
        assert not (await client.result(await client.sample(0))).failed
        assert refusals == 0


async def test_operations_go_on_where_no_snapshot_can_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw it")

    async with server_with_model(tmp_path / "data") as client:
        monkeypatch.setattr(client.trainer, "snapshot", broken)
        client.services.scheduler.actor(client.model_id).model.log.must_end = True
        for number in range(1, 4):
            assert not (await client.result(await client.forward_backward(number))).failed
        client.trainer.lose(client.model_id)
        assert not (await client.result(await client.optim_step(4))).failed
        assert client.trainer.applied == [(client.model_id, [1, 1, 1])]


async def test_what_is_sent_to_an_unloaded_model_is_not_logged(tmp_path: Path) -> None:
    async with server_with_model(tmp_path / "data") as client:
        await client.services.scheduler.drop(client.model_id)
        assert "create it again" in (await client.error(await client.forward_backward(1)))["error"]
        assert [entry async for entry in client.services.futures.read_log(client.model_id)] == []


async def test_a_snapshot_that_is_not_recorded_yet_is_swept_by_nobody(tmp_path: Path) -> None:
    """A slow disk or a long queue of other models' snapshots may take longer than unreferenced weights are kept."""
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        may_record, queue = asyncio.Event(), client.services.futures.queue
        flush = queue.flush

        async def flush_later() -> None:
            await may_record.wait()
            await flush()

        queue.flush = flush_later  # type: ignore[method-assign]
        model = client.services.scheduler.actor(client.model_id).model
        await client.result(await client.optim_step(1))
        model.log.must_end = True
        await client.result(await client.optim_step(2))
        await asyncio.sleep(0.1)
        [written] = tmp_path.glob("checkpoints/*/snapshots/model~*")  # noqa: ASYNC240
        await client.services.storage.delete_unreferenced(time.time() + 1)
        may_record.set()
        await model.settle()
        assert written.is_dir() and (await client.services.runs.get(client.model_id)).snapshot == str(
            written.relative_to(tmp_path)
        )
        await client.trainer.die()
        last = await client.result(await client.optim_step(3))
        assert not last.failed and json.loads(last.body)["metrics"]["step"] == 3


async def test_what_a_trainer_had_written_of_a_snapshot_when_it_died_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(trainer: FakeTrainer, _: LoadedModel, directory: Path) -> Awaitable[None]:
        partly = directory.with_name(f".{directory.name}.0123")  # as `write_aside` leaves it
        partly.mkdir(parents=True)
        (partly / "adapter_model.safetensors").write_bytes(b"x" * 1000)
        await trainer.die()
        raise ProcessDied("the trainer was killed")

    monkeypatch.setattr(FakeTrainer, "snapshot", dies)
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await client.result(await client.optim_step(1))
        client.services.scheduler.actor(client.model_id).model.log.must_end = True
        await client.result(await client.optim_step(2))
        await asyncio.sleep(0.1)
        [partly] = tmp_path.glob("checkpoints/*/snapshots/.model~*")  # noqa: ASYNC240
        await client.services.storage.delete_unreferenced(time.time() + 1)
        assert not partly.exists()


async def test_a_cancelled_save_keeps_the_files_of_a_row_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops cancels what has not ended, also while the database commits."""
    async with server_with_gradient(tmp_path / "data") as before:
        await before.result(await before.save(2, "kept"))
        put = before.services.checkpoints.put

        async def put_and_be_cancelled(*arguments: Any) -> None:
            await put(*arguments)
            raise asyncio.CancelledError

        monkeypatch.setattr(before.services.checkpoints, "put", put_and_be_cancelled)
        saving = await before.save(3, "kept", overwrite=True)
        await asyncio.sleep(0.1)
        path = parse_path(f"tinker://{before.model_id}/weights/kept")
    async with server(tmp_path / "data") as after:
        assert not (await after.result(saving)).failed
        saved = await after.services.checkpoints.find(path)
        assert saved is not None and after.services.storage.holds(saved.directory)


async def test_a_model_is_restored_by_a_snapshot_whose_commit_had_seemed_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with_gradient(tmp_path / "data") as client:
        await client.result(await client.optim_step(2))
        await suspend(client)
        await client.result(await client.forward_backward(3))
        await client.result(await client.optim_step(4))
        services, set_snapshot = client.services, client.services.runs.set_snapshot
        change = services.runs._db.change

        async def commit_without_an_answer(work: Any) -> None:
            await change(work)
            raise DatabaseUnavailable("the database does not answer")

        async def set_without_an_answer(*arguments: Any) -> None:
            with monkeypatch.context() as silent:
                silent.setattr(services.runs._db, "change", commit_without_an_answer)
                await set_snapshot(*arguments)

        monkeypatch.setattr(services.runs, "set_snapshot", set_without_an_answer)
        assert not await services.scheduler.actor(client.model_id).model._take_and_record()
        monkeypatch.setattr(services.runs, "set_snapshot", set_snapshot)
        client.trainer.lose(client.model_id)
        await client.result(await client.forward_backward(5))
        assert client.trainer.steps[client.model_id] == 2


async def test_an_operation_that_later_ones_have_overtaken_is_not_run_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit had seemed to fail, and its client went on without it."""
    async with server_with_gradient(tmp_path / "data") as before:
        rows, insert = before.services.futures.rows, before.services.futures.rows.insert
        tries = 0

        async def insert_without_an_answer(*arguments: Any) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                await insert(*arguments)
            raise DatabaseUnavailable("the database does not answer")

        with monkeypatch.context() as silent:
            silent.setattr(rows, "insert", insert_without_an_answer)
            with pytest.raises(DatabaseUnavailable):
                await before.forward_backward(2)
        assert (await before.result(await before.optim_step(3))).failed, "its batch lacks a part"
        await before.result(await before.forward_backward(4))
        assert not (await before.result(await before.optim_step(5))).failed
        model_id = before.model_id
    async with server(tmp_path / "data") as after:
        await after.result(await after.forward_backward(6, model_id=model_id))
        assert not (await after.result(await after.optim_step(7, model_id))).failed
        assert ("forward_backward", "loss 2") not in after.trainer.calls
        assert after.trainer.applied[-1] == (model_id, [1])


async def test_a_model_whose_loaded_weights_have_no_snapshot_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with_gradient(tmp_path / "data") as client:
        await client.result(await client.optim_step(2))
        await client.result(await client.save(3, "passing"))
        with monkeypatch.context() as full:
            full.setattr(client.trainer, "snapshot", refuse)
            path = f"tinker://{client.model_id}/weights/passing"
            loading = LoadWeightsRequest(model_id=client.model_id, seq_id=4, path=path, optimizer=True)
            assert not (await client.result(await client.submit("load_weights", loading, 4))).failed
            taken = await client.services.checkpoints.take(parse_path(path), client.owner)
            await client.services.storage.delete(taken)
            with pytest.raises(BackendFailed, match="stays in memory"):
                await suspend(client)
        assert not (await client.result(await client.forward_backward(5))).failed
        await suspend(client)
        assert not (await client.result(await client.optim_step(6))).failed
