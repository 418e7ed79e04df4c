"""A trainer that dies loses nothing: results after it are, bit for bit, those of a trainer that lives.

pytest tests/contract/test_recovery.py
"""

import asyncio
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.recovery import RealTrainer, create, finished, forward_backward, logprobs_of, server, train
from tests.trainers import config
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.processes import supervisor
from tinker_server.backends.processes.launcher import launch_trainer
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.client import TrainerClient

pytestmark = pytest.mark.usefixtures("forked_ranks")

STEPS = 3


@pytest.fixture(scope="module")
def undisturbed(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[bytes]]:
    """The results of so many steps where nothing dies."""

    async def run() -> list[list[bytes]]:
        async with server(tmp_path_factory.mktemp("undisturbed"), RealTrainer(tiny_vl)) as client:
            await create(client)
            return [await train(client, 1 + 3 * step) for step in range(STEPS)]

    return asyncio.run(run())


async def test_killed_between_and_in_operations_a_trainer_gives_what_it_would_have_given(
    tiny_vl, tmp_path, undisturbed
):
    backend = RealTrainer(tiny_vl)
    async with server(tmp_path, backend) as client:
        await create(client)
        found = [await train(client, 1)]
        backend.kill()
        found.append(await train(client, 4))
        running = asyncio.create_task(train(client, 7))
        await asyncio.sleep(0.3)
        backend.kill()
        began = time.monotonic()
        found.append(await running)
        print(f"{time.monotonic() - began:.1f} s from the kill to the last result")
        for result, wanted in zip(found, undisturbed, strict=True):
            assert result == wanted


async def test_a_trainer_that_dies_is_there_again_with_its_models_before_anybody_asks(tiny_vl, tmp_path, undisturbed):
    backend = RealTrainer(tiny_vl)
    async with server(tmp_path, backend) as client:
        await create(client)
        await create(client, 1)
        found = [await train(client, 1)]
        backend.kill()
        names = (f"{client.session_id}:train:{number}" for number in range(2))
        models = [client.services.scheduler.actor(name).model for name in names]
        async with asyncio.timeout(120):
            await backend.trainer.wait_for_restart(0)
            while not all(model.is_in_memory for model in models):  # noqa: ASYNC110 - it emits no event
                await asyncio.sleep(0.05)
        found.append(await train(client, 4))
    assert found == undisturbed[:2]


async def test_a_snapshot_and_the_log_after_it_give_the_same(tiny_vl, tmp_path, undisturbed):
    backend = RealTrainer(tiny_vl)
    async with server(tmp_path, backend) as client:
        await create(client)
        found = [await train(client, 1)]
        client.services.scheduler.actor(client.model_id).model.log.must_end = True
        found.append(await train(client, 4))
        await client.services.scheduler.actor(client.model_id).model.settle()
        assert (await client.services.runs.get(client.model_id)).snapshot is not None
        first = await forward_backward(client, 7)
        await finished(client, first)
        backend.kill()
        found.append(await train(client, 7))
    assert found == undisturbed


async def test_a_replay_that_is_interrupted_again_and_again_goes_on_from_where_it_was_and_gives_the_same(
    tiny_vl, tmp_path, undisturbed, monkeypatch
):
    """The trainer is killed at each second operation of its life, with a part of a gradient in it."""
    backend = RealTrainer(tiny_vl)
    async with server(tmp_path, backend) as client:
        snapshots = client.services.snapshots
        snapshots.limits = replace(snapshots.limits, interrupted_s=0)
        await create(client)
        found = [await train(client, 1), await train(client, 4)]
        begun, taken = ["nothing"], 0

        async def await_snapshot() -> None:
            while snapshots.num_taken == taken:  # noqa: ASYNC110 - it emits no event
                await asyncio.sleep(0.01)

        def counting(name, real):
            async def run(*arguments, **options):
                nonlocal taken
                if name == "forward_backward" and begun[-1] == name and begun.count("killed") < 3:
                    await asyncio.wait_for(await_snapshot(), 10)
                    taken = snapshots.num_taken
                    begun.append("killed")
                    backend.kill()
                else:
                    begun.append("from a snapshot" if name == "create_model" and arguments[3:] != (None,) else name)
                return await real(*arguments, **options)

            return run

        for name in ("create_model", "forward_backward"):
            monkeypatch.setattr(backend.trainer, name, counting(name, getattr(backend.trainer, name)))
        backend.kill()
        found.append(await train(client, 7))
    assert found == undisturbed
    assert begun.count("create_model") == 1 and begun.count("from a snapshot") == 3, begun


async def test_the_next_server_goes_on_bit_for_bit_where_a_killed_one_was(tiny_vl, tmp_path, undisturbed):
    async with server(tmp_path / "data", RealTrainer(tiny_vl)) as client:
        await create(client)
        found = [await train(client, 1)]
        await finished(client, await forward_backward(client, 4))
        waiting = await forward_backward(client, 5)
        shutil.copytree(tmp_path / "data", tmp_path / "left")
        session_id = client.session_id
    async with server(tmp_path / "left", RealTrainer(tiny_vl), session_id) as client:
        assert not (await finished(client, waiting)).failed
        found += [await train(client, 4), await train(client, 7)]
    assert found == undisturbed


async def test_the_next_server_goes_on_bit_for_bit_where_one_was_stopped_between_two_requests(
    tiny_vl, tmp_path, undisturbed
):
    async with server(tmp_path, RealTrainer(tiny_vl)) as client:
        await create(client)
        found = [await train(client, 1)]
        await finished(client, await forward_backward(client, 4))
        session_id = client.session_id
    assert list(tmp_path.glob("checkpoints/*/snapshots/*")), "the model is not on disk, with its gradient"
    async with server(tmp_path, RealTrainer(tiny_vl), session_id) as client:
        found += [await train(client, 4), await train(client, 7)]
    assert found == undisturbed


async def test_an_operation_under_which_the_trainer_dies_twice_fails_alone(tiny_vl, tmp_path, undisturbed):
    backend = RealTrainer(tiny_vl)
    async with server(tmp_path, backend) as client:
        await create(client)
        await create(client, 1)
        other = f"{client.session_id}:train:1"
        assert await train(client, 1, other) == undisturbed[0]
        real = backend.trainer.forward_backward

        async def deadly(model, batch, *, backward):
            if model.model_id == client.model_id:
                backend.signal(signal.SIGSTOP)  # so that it does not answer before it is killed
                asyncio.get_running_loop().call_later(0.2, backend.signal, signal.SIGKILL)
            return await real(model, batch, backward=backward)

        backend.trainer.forward_backward = deadly  # type: ignore[method-assign]
        result = await finished(client, await forward_backward(client, 1))
        assert result.failure_category == "server" and b"when this forward_backward ran before" in result.body
        backend.trainer.forward_backward = real  # type: ignore[method-assign]
        assert await train(client, 4, other) == undisturbed[1]
        assert (await client.error(await client.optim_step(2)))["category"] == "user"
        await finished(client, await forward_backward(client, 3))
        assert not (await finished(client, await client.optim_step(4))).failed


async def test_ranks_that_do_not_start_are_tried_again_and_operations_wait(tiny_vl, monkeypatch):
    failures = 0

    async def fail_at_times(spec, others):
        nonlocal failures
        if failures:
            failures -= 1
            raise BackendFailed("there is no memory left")
        return await launch_trainer(spec, others)

    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    trainer = TrainerClient(config(tiny_vl), fail_at_times)
    await trainer.start()
    try:
        failures = 2
        await trainer._supervisor.children[0].stop(0)
        async with asyncio.timeout(120):
            model = await trainer.create_model("m", Trainable(rank=4, seed=1), "owner")
        assert failures == 0 and not model.is_lost and await trainer.wait_for_restart(0) == 1
    finally:
        await trainer.stop()


async def test_one_of_two_ranks_killed_costs_a_pause(tiny_vl, tmp_path):
    backend = RealTrainer(tiny_vl, num_ranks=2)
    outcomes = []
    for disturbed in (False, True):
        async with server(tmp_path / str(disturbed), backend) as client:
            await create(client)
            await train(client, 1)
            if disturbed:
                backend.kill(1)
            outcomes.append(await train(client, 4))
    logprobs = [logprobs_of(outcome[0]) for outcome in outcomes]
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-6)
