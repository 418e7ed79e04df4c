"""A server's scheduling without HTTP: a client that submits as the routes do, on a backend of fakes."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes import FakeBackend
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.base import Request
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.old_clients.forward import ForwardRequest
from tinker_server.api_schemas.sampling import SampleRequest, SamplingParams
from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.api_schemas.training import (
    CreateModelRequest,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    LoraConfig,
    OptimStepRequest,
)
from tinker_server.api_schemas.weights import LoadWeightsRequest, SaveWeightsForSamplerRequest, SaveWeightsRequest
from tinker_server.app import serving
from tinker_server.auth.keys import LOCAL
from tinker_server.settings import Settings
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Operation, Result
from tinker_server.store.records import SamplingSession
from tinker_server.web.deps import Services
from tinker_server.web.submission import image_places

GRACE_S = 0.3


def batch(loss_fn: str, num_targets: int = 2) -> ForwardBackwardInput:
    """One datum."""
    targets = np.arange(1, num_targets + 1)
    chunk = EncodedTextChunk(tokens=np.array([1, 2]))
    datum = Datum(model_input=ModelInput(chunks=[chunk]), loss_fn_inputs={"target_tokens": targets})
    return ForwardBackwardInput(data=[datum], loss_fn=loss_fn)


class Client:
    """Submits as the routes do."""

    def __init__(self, services: Services, backend: FakeBackend, session_id: str) -> None:
        self.services = services
        self.trainer = backend.tiny.trainer
        self.sampler = backend.tiny.sampler
        self.session_id = session_id
        self.owner = LOCAL
        self.model_id = f"{session_id}:train:0"

    async def submit(
        self, kind: str, request: Request, seq_id: int, lane: str | None = None, owner: str | None = None
    ) -> str:
        body = request.model_dump_json().encode()
        operation = Operation(
            kind,
            lane or self.model_id,
            seq_id,
            body,
            "application/json",
            owner or self.owner,
            hashlib.sha256(body).hexdigest(),
            len(body),
            request=request,
            images=image_places(body, wire.JSON, request) if isinstance(request, ForwardBackwardRequest) else (),
        )
        scheduler = self.services.scheduler
        if kind == "sample":
            return await scheduler.samples.accept(operation)
        return await scheduler.actor(operation.lane.removesuffix(UNLOAD_SUFFIX)).accept(operation)

    async def create_model(self, number: int = 0, **fields: Any) -> str:
        values: dict[str, Any] = {"base_model": "tiny", "lora_config": LoraConfig(rank=8)} | fields
        request = CreateModelRequest(session_id=self.session_id, model_seq_id=number, **values)
        return await self.submit("create_model", request, 0, f"{self.session_id}:train:{number}")

    async def forward_backward(
        self, seq_id: int, loss_fn: str | None = None, model_id: str | None = None, num_targets: int = 2
    ) -> str:
        lane = model_id or self.model_id
        loss_input = batch(loss_fn or f"loss {seq_id}", num_targets)
        request = ForwardBackwardRequest(model_id=lane, seq_id=seq_id, forward_backward_input=loss_input)
        return await self.submit("forward_backward", request, seq_id, lane)

    async def forward(self, seq_id: int, loss_fn: str) -> str:
        request = ForwardRequest(model_id=self.model_id, seq_id=seq_id, forward_input=batch(loss_fn))
        return await self.submit("forward", request, seq_id)

    async def optim_step(self, seq_id: int, model_id: str | None = None) -> str:
        lane = model_id or self.model_id
        return await self.submit("optim_step", OptimStepRequest(model_id=lane, seq_id=seq_id), seq_id, lane)

    async def save(self, seq_id: int, path: str, **fields: Any) -> str:
        request = SaveWeightsRequest(model_id=self.model_id, seq_id=seq_id, path=path, **fields)
        return await self.submit("save_weights", request, seq_id)

    async def save_unnamed(self, seq_id: int) -> str:
        request = SaveWeightsForSamplerRequest(model_id=self.model_id, seq_id=seq_id, sampling_session_seq_id=7)
        return await self.submit("save_weights_for_sampler", request, seq_id)

    async def save_named_for_sampler(self, seq_id: int, path: str) -> str:
        request = SaveWeightsForSamplerRequest(model_id=self.model_id, seq_id=seq_id, path=path)
        return await self.submit("save_weights_for_sampler", request, seq_id)

    async def load_as(self, number: int, path: str, **fields: Any) -> str:
        request = LoadWeightsRequest(session_id=self.session_id, model_seq_id=number, path=path, **fields)
        return await self.submit("load_weights", request, 0, f"{self.session_id}:train:{number}")

    async def sample(self, seq_id: int = 0) -> str:
        sampler_id = f"{self.session_id}:sample:0"
        await self.services.samplers.create(
            SamplingSession(
                owner=LOCAL,
                sampling_session_id=sampler_id,
                session_id=self.session_id,
                base_model="tiny",
                created_at=1.0,
            )
        )
        request = SampleRequest(
            sampling_session_id=sampler_id,
            seq_id=seq_id,
            prompt=ModelInput(chunks=[EncodedTextChunk(tokens=np.array([1, 2]))]),
            sampling_params=SamplingParams(max_tokens=1),
        )
        return await self.submit("sample", request, seq_id, sampler_id)

    async def result(self, request_id: str) -> Result:
        result = await self.services.futures.wait(request_id, LOCAL, 10)
        assert result is not None
        return result

    async def error(self, request_id: str) -> dict[str, str]:
        result = await self.result(request_id)
        assert result.failed, result.body
        error: dict[str, str] = json.loads(result.body)
        return error

    def ran(self) -> list[str]:
        return [name for name, model_id in self.trainer.calls if model_id == self.model_id][1:]


@asynccontextmanager
async def server(
    data_dir: Path, database_url: str = "", numerics: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    backend = FakeBackend()
    backend.tiny.info = replace(backend.tiny.info, numerics=numerics or {})
    values = {"gap_grace_s": GRACE_S, "drain_s": 0.1} | settings
    async with serving(Settings(data_dir=data_dir, database_url=database_url, **values), backend) as services:
        yield Client(services, backend, await services.sessions.create(CreateSessionRequest(), None, LOCAL))
    assert not backend.running
