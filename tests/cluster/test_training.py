"""Machines that join train too: as one does, and nothing is lost with them."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from torch import Tensor

from tests.cluster.machines import Machine, joined, kill, started, until
from tests.factories import present
from tests.recovery import RealTrainer, create, finished, forward_backward, logprobs_of, server, train
from tests.servers import MODEL
from tests.submitting import Client
from tests.trainers import assert_same
from tinker_server.backends.cluster.bases import RemoteBases
from tinker_server.backends.cluster.client import Cluster
from tinker_server.backends.cluster.engines import RemoteEngines
from tinker_server.backends.cluster.replicas import RemoteReplicas
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.protocol import LoadedModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forked_ranks"),
]
STEPS = 6


@dataclass
class Running:
    """A server with a cluster, and the client that trains on it."""

    client: Client
    backend: RealTrainer
    cluster: Cluster
    model: Path
    num_steps: int = 0

    @property
    def ranks(self) -> list[Child]:
        return self.backend.trainer._supervisor.children

    @property
    def machines(self) -> list[str]:
        """Of the ranks that live, by the name of the machine that has each."""
        if not self.backend.trainer._supervisor.is_alive:
            return []
        return [child.name.partition(" on ")[2] or "here" for child in self.ranks]

    @property
    def started(self) -> list[str]:
        """The ranks that were started last, which may not be ready."""
        return [process.name for process in self.backend.trainer.processes()]

    async def until_on(self, *machines: str) -> None:
        await until(lambda: self.machines == [*machines], 120)

    async def train(self) -> list[bytes]:
        self.num_steps += 1
        return await train(self.client, 3 * self.num_steps - 2)

    def stop_rank(self) -> None:
        """Let the other machine's rank answer no more."""
        [rank] = [child.process.pid for child in self.ranks if child.name.endswith(" on a")]
        psutil.Process(rank).send_signal(signal.SIGSTOP)

    async def train_through_a_snapshot(self, machine: Machine) -> list[bytes]:
        """A step, in which a snapshot begins while the machine's rank does not answer; then the machine is killed."""
        trainer, begun = self.backend.trainer, asyncio.Event()
        real = trainer.snapshot

        async def snapshot(model: LoadedModel, directory: Path) -> Awaitable[None]:
            if not begun.is_set():
                self.stop_rank()
            begun.set()
            return await real(model, directory)

        trainer.snapshot = snapshot  # type: ignore[method-assign]
        present(self.client.services.scheduler.actor(self.client.model_id)).model.log.must_end = True
        training = asyncio.create_task(self.train())
        async with asyncio.timeout(60):
            await begun.wait()
        await asyncio.sleep(0.2)
        kill(machine.process.pid)
        return await training

    async def while_stopped(self, machine: Machine, ask: Callable[[], Awaitable[str]]) -> tuple[str, set[str]]:
        """Have an operation begin while a rank on the machine does not answer, then kill the machine; return the
        operation's id, and what the model waits for until there is a result."""
        self.stop_rank()
        model = self.client.services.scheduler.actor(self.client.model_id).model
        before = model.handle.latest_work
        request_id = await ask()
        await until(lambda: model.handle.latest_work > before)
        await asyncio.sleep(0.2)
        kill(machine.process.pid)
        waited_for = set()
        while self.client.services.futures.queue.get(request_id) is not None:
            waited_for.add(self.client.services.scheduler.waits_for(self.client.model_id) or "")
            await asyncio.sleep(0.02)
        return request_id, waited_for


@asynccontextmanager
async def training(model: Path, directory: Path) -> AsyncIterator[Running]:
    backend = RealTrainer(model)
    spec = replace(backend.trainer._spec, name=MODEL)
    bases = RemoteBases({MODEL: spec})
    replicas = RemoteReplicas("127.0.0.1", {MODEL: (spec, backend.trainer)}, bases, RemoteEngines({}, bases))
    async with server(directory / "data", backend) as client, started(directory, bases, replicas) as cluster:
        await create(client)
        yield Running(client, backend, cluster, model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[bytes]], Path]:
    """The results of so many steps on one machine without a cluster, and the saved model."""
    directory = tmp_path_factory.mktemp("undisturbed")
    async with server(directory, RealTrainer(tiny_vl)) as client:
        await create(client)
        results = [await train(client, 1 + 3 * step) for step in range(STEPS)]
        return results, await saved(client, 1 + 3 * STEPS, directory)


def saved_in(directory: Path) -> Path:
    [found] = directory.glob("checkpoints/**/weights/saved*")
    return found


async def saved(client: Client, seq_id: int, directory: Path) -> Path:
    result = await finished(client, await client.save(seq_id, "saved"))
    assert not result.failed, result.body
    return saved_in(directory)


def assert_near(results: list[bytes], wanted: list[bytes]) -> None:
    """Of a step: the bound of two ranks."""
    for got, other in zip(results[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(logprobs_of(got), logprobs_of(other), atol=1e-4)


def tensors(directory: Path) -> dict[str, Tensor]:
    files = [load_file(directory / name) for name in ("adapter_model.safetensors", "optimizer.safetensors")]
    return files[0] | files[1]


async def test_machines_that_join_train_and_nothing_is_lost_with_them(
    undisturbed: tuple[list[list[bytes]], Path], tiny_vl: Path, tmp_path: Path, temporary: str
) -> None:
    wanted, wanted_files = undisturbed
    async with training(tiny_vl, tmp_path) as running:
        client = running.client
        assert await running.train() == wanted[0]  # bit for bit: it is the only machine
        async with joined(running.cluster, "a", tiny_vl) as machine:
            await running.until_on("here", "a")
            assert_near(await running.train(), wanted[1])

            ask = lambda: forward_backward(client, 7)  # noqa: E731
            request_id, waited_for = await running.while_stopped(machine, ask)
            assert not (await finished(client, request_id)).failed
            assert "the trainer of tiny starts again without a, which has left or is lost" in waited_for
            assert running.machines == ["here"]
            assert_near(await running.train(), wanted[2])
        async with joined(running.cluster, "a", tiny_vl) as machine:
            await running.until_on("here", "a")
            assert_near(await running.train(), wanted[3])
            assert_near(await running.train_through_a_snapshot(machine), wanted[4])
            assert running.machines == ["here"]
        async with joined(running.cluster, "a", tiny_vl) as machine:
            await running.until_on("here", "a")
            assert_near(await running.train(), wanted[5])

            request_id, _ = await running.while_stopped(machine, lambda: client.save(1 + 3 * STEPS, "saved"))
            assert not (await finished(client, request_id)).failed
            assert_same(tensors(saved_in(tmp_path / "data")), tensors(wanted_files), rtol=1e-4)

        async with joined(running.cluster, "a", tiny_vl) as machine:
            await until(lambda: f"trainer {MODEL} rank 1 on a" in running.started)
            kill(machine.process.pid)  # while the ranks start
            await running.until_on("here")
        async with joined(running.cluster, "a", tiny_vl) as machine:
            await running.until_on("here", "a")
            [head] = running.cluster.processes()
            kill(head.pid)
            await until(lambda: running.machines == [])
            await running.until_on("here", "a")  # by itself
            await machine.stop()
            await running.until_on("here")
            assert running.cluster.states() == []
