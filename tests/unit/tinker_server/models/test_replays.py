"""Running a log again is interrupted as often as it likes, and gets further each time; new work waits for it.

A crash of the server is a copy of its disk.
"""

import asyncio
import errno
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeTrainer
from tests.submitting import Client, server
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.protocol import EncodedBatch, LoadedModel, ProcessDied
from tinker_server.models import model as models
from tinker_server.store.checkpoints import parse_path

STEPS = 7
"""Steps of two parts and an optim_step each."""


class Lives:
    """After so many operations of a trainer `end` is called, which must not return as if nothing were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_operations: int) -> None:
        self.num_ends = 0
        self.end: Callable[[FakeTrainer], Awaitable[None]] | None = None
        self._left = self._num_operations = num_operations
        forward_backward, optim_step = FakeTrainer.forward_backward, FakeTrainer.optim_step

        async def short_forward_backward(
            trainer: FakeTrainer, model: LoadedModel, batch: EncodedBatch, *, backward: bool
        ) -> object:
            await self._live(trainer)
            return await forward_backward(trainer, model, batch, backward=backward)

        async def short_step(trainer: FakeTrainer, model: LoadedModel, adam: AdamParams) -> object:
            await self._live(trainer)
            return await optim_step(trainer, model, adam)

        monkeypatch.setattr(FakeTrainer, "forward_backward", short_forward_backward)
        monkeypatch.setattr(FakeTrainer, "optim_step", short_step)

    async def _live(self, trainer: FakeTrainer) -> None:
        if self.end is None:
            return
        await asyncio.sleep(0.05)  # the snapshot before is written meanwhile
        if self._left == 0:
            self._left = self._num_operations
            self.num_ends += 1
            await self.end(trainer)
        self._left -= 1


async def die(trainer: FakeTrainer) -> None:
    await trainer.die()
    raise ProcessDied("the trainer was killed")


def follow_closely(client: Client) -> None:
    """A snapshot after each operation that is run again, where the one before is written."""
    snapshots = client.services.snapshots
    snapshots.limits = replace(snapshots.limits, interrupted_s=0)


async def steps(client: Client, model_id: str | None = None) -> None:
    for number in range(1, 1 + 3 * STEPS, 3):
        await client.forward_backward(number, model_id=model_id)
        await client.forward_backward(number + 1, model_id=model_id)
        assert not (await client.result(await client.optim_step(number + 2, model_id))).failed


def applied_before(client: Client) -> list[Any]:
    return [gradient for _, gradient in client.trainer.applied]


async def test_a_replay_under_a_trainer_that_always_dies_before_its_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(monkeypatch, 2)
    async with server(tmp_path) as client:
        follow_closely(client)
        await client.result(await client.create_model())
        await steps(client)
        await client.forward_backward(3 * STEPS + 1)
        lives.end = die
        await client.trainer.die()
        result = await client.result(await client.optim_step(3 * STEPS + 2))
        assert not result.failed, result.body
        assert json.loads(result.body)["metrics"]["step"] == STEPS + 1
        assert applied_before(client)[-1] == [1]
        assert lives.num_ends > 7, "more than restorations that leave nothing are tried"


async def test_a_replay_under_servers_that_always_end_before_its_end_ends_and_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, ended = Lives(monkeypatch, 6), asyncio.Event()

    async def end_server(_: FakeTrainer) -> None:
        ended.set()
        await asyncio.Event().wait()

    data_dir = tmp_path / "data"
    async with server(data_dir) as client:
        await client.result(await client.create_model())
        await steps(client)
        client.trainer.gates["hold"].clear()
        model_id, waiting = client.model_id, await client.forward_backward(3 * STEPS + 1, "hold")
        left = data_dir.with_name("0")
        await asyncio.sleep(0.1)
        shutil.copytree(data_dir, left)
    lives.end = end_server
    for number in range(1, 9):
        async with server(left) as client:
            follow_closely(client)
            result = asyncio.create_task(client.result(waiting))
            end = asyncio.create_task(ended.wait())
            await asyncio.wait([result, end], return_when=asyncio.FIRST_COMPLETED)
            end.cancel()
            if result.done():
                assert not result.result().failed, result.result().body
                lives.end = None
                last = await client.result(await client.optim_step(3 * STEPS + 2, model_id))
                assert json.loads(last.body)["metrics"]["step"] == STEPS + 1
                assert applied_before(client)[-1] == [1]
                break
            ended.clear()
            result.cancel()
            left = data_dir.with_name(f"{number}")
            shutil.copytree(data_dir.with_name(f"{number - 1}"), left)
    else:
        pytest.fail(f"no result after {lives.num_ends} servers")
    assert lives.num_ends >= 3


async def test_a_short_replay_takes_no_snapshot(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await steps(client)
        await client.trainer.die()
        await client.result(await client.optim_step(3 * STEPS + 1))
        assert client.services.snapshots.num_taken == 0


async def test_new_work_of_others_waits_for_a_replay(tmp_path: Path) -> None:
    async with server(tmp_path / "data") as before:
        await before.result(await before.create_model())
        await steps(before)
        shutil.copytree(tmp_path / "data", tmp_path / "left")
    async with server(tmp_path / "left") as client:
        others = [f"{client.session_id}:train:{number}" for number in range(4)]
        for number in range(4):
            await client.result(await client.create_model(number))
        client.trainer.gates["hold"].clear()
        waiting = [await client.forward_backward(1, "hold", others[0])]
        await asyncio.sleep(0.05)
        for name in others[1:]:
            waiting += [await client.forward_backward(number, "new", name) for number in range(1, 4)]
        waiting.append(await client.optim_step(3 * STEPS + 1, before.model_id))
        await asyncio.sleep(0.1)
        client.trainer.gates["hold"].set()
        for request_id in waiting:
            await client.result(request_id)
        replayed = [at for at, (_, model_id) in enumerate(client.trainer.calls) if model_id == before.model_id]
        assert len(replayed) == 1 + 3 * STEPS + 1
        last = replayed[-2]  # what follows is the new step, which has no precedence
        names = [name for name, _ in client.trainer.calls]
        assert names.count("new") == 9 and "new" not in names[:last]


@pytest.mark.parametrize("slow", ["nothing", "waiting", "copying", "writing"])
async def test_snapshots_are_taken_as_often_as_their_cost_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Any work is worth the first. Half a second is worth another that takes no time, or that only waited for the
    trainer, but no one, of another model either, after one that took 0.4 s."""
    optim_step, snapshot = FakeTrainer.optim_step, FakeTrainer.snapshot

    async def long_step(trainer: FakeTrainer, model: LoadedModel, adam: AdamParams) -> object:
        await asyncio.sleep(0.5)
        model.worked_s += 0.5
        return await optim_step(trainer, model, adam)

    async def slow_snapshot(trainer: FakeTrainer, model: LoadedModel, directory: Path) -> Awaitable[None]:
        await asyncio.sleep(0.1 if slow == "waiting" else 0)
        model.worked_s += 0.4 if slow == "copying" else 0
        written = await snapshot(trainer, model, directory)

        async def write() -> None:
            await asyncio.sleep(0.4 if slow == "writing" else 0)
            await written

        return write()

    monkeypatch.setattr(FakeTrainer, "optim_step", long_step)
    monkeypatch.setattr(FakeTrainer, "snapshot", slow_snapshot)
    async with server(tmp_path) as client:
        snapshots = client.services.snapshots
        snapshots.limits = replace(snapshots.limits, replay_s=0)
        for number in range(2):
            await client.result(await client.create_model(number))
        for number in (1, 3):
            for model_id in (client.model_id, f"{client.session_id}:train:1"):
                await client.forward_backward(number, model_id=model_id)
                await client.result(await client.optim_step(number + 1, model_id))
                await asyncio.sleep(0.3)  # the snapshot is written meanwhile
        assert (snapshots.num_taken > 1) == (slow in ("nothing", "waiting")), snapshots.num_taken


async def test_a_log_counts_the_trainers_work_and_not_what_its_operations_waited(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        model = client.services.scheduler.actor(client.model_id).model
        client.trainer.gates["hold"].clear()
        waiting = await client.forward_backward(1, "hold")
        await asyncio.sleep(0.1)
        model.handle.worked_s += 0.02
        client.trainer.gates["hold"].set()
        await client.result(waiting)
        assert model.log.seconds == pytest.approx(0.02)


async def test_a_load_whose_snapshot_failed_gets_one_at_the_next_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it depends on a checkpoint that may be deleted, after a death of the trainer too."""
    monkeypatch.setattr(models, "RETRY_S", 0)
    snapshot, is_full = FakeTrainer.snapshot, True

    async def fails(trainer: FakeTrainer, model: LoadedModel, directory: Path) -> Awaitable[None]:
        if is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return await snapshot(trainer, model, directory)

    monkeypatch.setattr(FakeTrainer, "snapshot", fails)
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await client.result(await client.optim_step(1))
        path = json.loads((await client.result(await client.save(2, "kept"))).body)["path"]
        await client.result(await client.load_as(1, path, optimizer=True))
        loaded, counts = f"{client.session_id}:train:1", client.services.snapshots
        await client.trainer.die()
        assert not (await client.result(await client.optim_step(1, loaded))).failed  # after a replay
        assert counts.num_taken == 0
        is_full = False
        await client.result(await client.optim_step(2, loaded))
        async with asyncio.timeout(10):
            while counts.num_taken == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        taken = await client.services.checkpoints.take(parse_path(path), client.owner)
        assert taken is not None
        await client.services.storage.delete(taken)
        await client.trainer.die()
        last = await client.result(await client.optim_step(3, loaded))
        assert not last.failed and json.loads(last.body)["metrics"]["step"] == 4
