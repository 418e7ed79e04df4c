"""A trainer that other machines join: it uses them when it is idle, and goes on without those that fail.

The machines are this one; `tests/cluster/test_training.py` has real ones.

pytest tests/contract/test_replicas.py
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.factories import MIXED, cross_entropy, datum
from tests.replicas import Machine, machines, until_on
from tests.trainers import LORA, SMOOTH, config
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.processes import supervisor
from tinker_server.backends.protocol import EncodedBatch, LoadedModel, ModelLost, ProcessDied
from tinker_server.backends.trainer import client, replicas
from tinker_server.backends.trainer.client import TrainerClient

pytestmark = [pytest.mark.usefixtures("forked_ranks"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "IDLE_S", 0.2)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(replicas, "_LOSS_S", 0.5)


@pytest_asyncio.fixture
async def trainer(tiny_vl: Path) -> AsyncIterator[TrainerClient]:
    trainer = TrainerClient(config(tiny_vl))
    await trainer.start()
    yield trainer
    await trainer.stop()


@pytest.fixture
def batch(renderer: Renderer) -> EncodedBatch:
    return cross_entropy([datum(one, renderer, seed) for seed, one in enumerate(MIXED.values())])


async def train(trainer: TrainerClient, model: LoadedModel, batch: EncodedBatch) -> None:
    await trainer.forward_backward(model, batch, backward=True)
    await trainer.optim_step(model, SMOOTH)


async def killed_while_it_works(trainer: TrainerClient, model: LoadedModel, batch: EncodedBatch, rank: int) -> None:
    process = psutil.Process(trainer._supervisor.children[rank].process.pid)
    process.send_signal(signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.3, process.kill)
    await trainer.forward_backward(model, batch, backward=True)


async def test_a_machine_is_used_once_nothing_is_asked_and_no_snapshot_is_being_written(
    trainer: TrainerClient, batch: EncodedBatch, tmp_path: Path
) -> None:
    model = await trainer.create_model("m", LORA, "owner")
    assert trainer.ranks == "1" and trainer.waits_for() is None
    await (await trainer.snapshot(model, tmp_path / "snapshot"))
    async with trainer._queue.grant("owner", "m"):
        trainer.attach(Machine(trainer._spec).replica)
        await asyncio.sleep(1)
        assert machines(trainer) == ["here"]
    await train(trainer, model, batch)
    writing = asyncio.get_running_loop().create_future()
    trainer._writing.add(writing)  # on a slow disk
    await asyncio.sleep(1)
    assert machines(trainer) == ["here"]
    writing.set_result(None)
    await until_on(trainer)
    assert trainer.waits_for() == "the trainer of tiny starts again, with a"
    assert await trainer.wait_for_restart(0) == 1
    assert machines(trainer) == ["here", "a"] and trainer.ranks == "2 on 2 machines, float32 between them"
    with pytest.raises(ModelLost):  # which the server restores from its snapshot
        await train(trainer, model, batch)
    model = await trainer.create_model("m", LORA, "owner", tmp_path / "snapshot")
    await train(trainer, model, batch)


async def test_a_machine_that_is_lost_takes_no_operation_with_it(trainer: TrainerClient, batch: EncodedBatch) -> None:
    machine = Machine(trainer._spec)
    trainer.attach(machine.replica)
    await until_on(trainer, "here", "a")
    model = await trainer.create_model("m", LORA, "owner")
    process = psutil.Process(trainer._supervisor.children[1].process.pid)
    process.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(train(trainer, model, batch))
    await asyncio.sleep(0.3)
    await trainer.detach(machine.replica)
    with pytest.raises(ModelLost, match="its ranks on a"):
        await asked
    assert not process.is_running()
    assert trainer.waits_for() == "the trainer of tiny starts again without a, which has left or is lost"
    await until_on(trainer, "here")
    assert trainer.ranks == "1" and trainer.waits_for() is None


async def test_a_machine_with_which_ranks_do_not_start_is_used_later(
    trainer: TrainerClient, batch: EncodedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "ASIDE_S", 4.0)
    machine = Machine(trainer._spec)
    machine.failures = 1
    trainer.attach(machine.replica)
    await until_on(trainer)
    await until_on(trainer, "here")
    model = await trainer.create_model("m", LORA, "owner")
    await train(trainer, model, batch)
    assert trainer.ranks == "1" and machine.failures == 0
    await until_on(trainer, "here", "a")


async def test_a_machine_whose_ranks_die_twice_is_not_used_for_a_while_and_costs_no_operation(
    trainer: TrainerClient, batch: EncodedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "ASIDE_S", 20.0)
    trainer.attach(Machine(trainer._spec).replica)
    for remaining in (["here", "a"], ["here"]):
        await until_on(trainer, "here", "a")
        model = await trainer.create_model("m", LORA, "owner")
        with pytest.raises(ModelLost, match="its ranks on a"):
            await killed_while_it_works(trainer, model, batch, rank=1)
        await until_on(trainer, *remaining)
    await until_on(trainer, "here", "a")  # after the while


async def test_a_rank_of_the_serving_machine_that_dies_may_be_the_operations_fault(
    trainer: TrainerClient, batch: EncodedBatch
) -> None:
    machine = Machine(trainer._spec)
    trainer.attach(machine.replica)
    await until_on(trainer, "here", "a")
    model = await trainer.create_model("m", LORA, "owner")
    with pytest.raises(ProcessDied):
        await killed_while_it_works(trainer, model, batch, rank=0)
    await until_on(trainer, "here", "a")
    assert machine.replica.num_deaths == 0
