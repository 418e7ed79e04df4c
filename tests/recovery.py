"""The server's own parts with a true trainer, and work whose results show what a crash has changed."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tests.factories import MIXED, datum, make_renderer
from tests.fakes import FakeBackend
from tests.submitting import Client
from tests.trainers import config
from tinker_server.api_schemas.old_clients import results
from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest, LoraConfig
from tinker_server.app import serving
from tinker_server.auth.keys import LOCAL
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.settings import Settings
from tinker_server.store.futures.records import Result


class RealTrainer(FakeBackend):
    """A true trainer beside a sampler that computes nothing."""

    def __init__(self, source: Path, **sizes: int) -> None:
        """`sizes` are those of `trainers.config`."""
        super().__init__()
        self.trainer = TrainerClient(config(source, **sizes))
        self.tiny.trainer = self.trainer  # type: ignore[assignment]

    async def start(self) -> None:
        await self.trainer.start()
        await super().start()

    async def stop(self) -> None:
        await self.trainer.stop()
        await super().stop()

    def signal(self, number: signal.Signals, rank: int = 0) -> None:
        os.kill(self.trainer._supervisor.children[rank].process.pid, number)

    def kill(self, rank: int = 0) -> None:
        self.signal(signal.SIGKILL, rank)


@asynccontextmanager
async def server(data_dir: Path, backend: RealTrainer, session_id: str | None = None) -> AsyncIterator[Client]:
    settings = Settings(data_dir=data_dir, gap_grace_s=0.2, drain_s=0.5)
    async with serving(settings, backend) as services:
        session_id = session_id or await services.sessions.create(CreateSessionRequest(), None, LOCAL)
        yield Client(services, backend, session_id)


async def forward_backward(client: Client, seq_id: int, model_id: str | None = None) -> str:
    lane, items = model_id or client.model_id, list(MIXED.values())
    renderer = make_renderer(Path(client.trainer._spec.directory))  # type: ignore[attr-defined]
    data = [datum(items[(seq_id + n) % len(items)], renderer, seq_id) for n in range(2)]
    loss_input = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = ForwardBackwardRequest(model_id=lane, seq_id=seq_id, forward_backward_input=loss_input)
    return await client.submit("forward_backward", request, seq_id, lane)


async def finished(client: Client, request_id: str) -> Result:
    async with asyncio.timeout(120):
        while (result := await client.services.futures.wait(request_id, LOCAL, 10)) is None:
            pass
    return result


async def train(client: Client, first: int, model_id: str | None = None) -> list[bytes]:
    """Two parts of a batch, a step: what came of them."""
    submitted = [await forward_backward(client, first + n, model_id) for n in range(2)]
    submitted.append(await client.optim_step(first + 2, model_id))
    results = [await finished(client, one) for one in submitted]
    assert not any(one.failed for one in results), [one.body for one in results if one.failed]
    return [one.body for one in results]


async def create(client: Client, number: int = 0) -> None:
    result = await finished(client, await client.create_model(number, lora_config=LoraConfig(rank=8, seed=1)))
    assert not result.failed, result.body


def logprobs_of(body: bytes) -> np.ndarray:
    outputs = json.loads(b"".join(results.forward_backward_json(body)))["loss_fn_outputs"]
    return np.concatenate([one["logprobs"]["data"] for one in outputs])
