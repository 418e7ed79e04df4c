"""Routes that create sampling sessions and sample from them."""

import secrets
import time
import uuid
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from tinker_server.api_schemas import ids
from tinker_server.api_schemas.futures import UntypedFuture
from tinker_server.api_schemas.inputs import QUICK_CHUNKS, EncodedTextChunk
from tinker_server.api_schemas.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
)
from tinker_server.errors import (
    BadRequest,
    Busy,
    SessionFinished,
    UnknownBaseModel,
    UnknownCheckpoint,
    UnknownSampler,
    UnknownSession,
)
from tinker_server.offload import LARGE, off_loop
from tinker_server.store.futures.records import Operation
from tinker_server.store.records import SamplingSession
from tinker_server.web.deps import Caller, Samplers, Server
from tinker_server.web.refusals import SUBMIT, describe
from tinker_server.web.submission import Body
from tinker_server.weights.lookup import find_weights

router = APIRouter()
CUT = (
    "with top_k or top_p the log probabilities of samples are renormalised over the tokens that are kept: a ratio of"
    " them to a trainer's contains the probability of the kept tokens"
)
"""Text of a header that the SDK logs as a warning."""
MAX_CLIENTS = 10**9
"""The SDK's own bound, so that the numbers of samples stay below 2^63."""


@router.post(
    "/create_sampling_session",
    responses=describe(UnknownSession, SessionFinished, BadRequest, UnknownCheckpoint, UnknownBaseModel, Busy),
)
async def create_sampling_session(
    request: CreateSamplingSessionRequest, server: Server, caller: Caller
) -> CreateSamplingSessionResponse:
    """Bind a sampling session to a base model or to saved weights, which are loaded when first used."""
    await server.sessions.require(request.session_id, caller, must_be_open=True)
    server.records.add(caller)
    found = await find_weights(server.weights, request.base_model, request.model_path, caller)
    sampler = SamplingSession(
        sampling_session_id=ids.sampling_session_id(request.session_id, request.sampling_session_seq_id),
        owner=caller,
        session_id=request.session_id,
        base_model=found.base_model,
        base_fingerprint=found.base_fingerprint,
        model_path=request.model_path,
        directory=found.directory,
        created_at=time.time(),
    )
    return CreateSamplingSessionResponse(sampling_session_id=await server.samplers.create(sampler))


@router.get("/samplers/{sampler_id}", responses=describe(UnknownSampler))
async def get_sampler(
    sampler_id: Annotated[str, Path(description="A sampling session.")], samplers: Samplers, caller: Caller
) -> GetSamplerResponse:
    """Return the base model and the weights of a sampling session."""
    sampler = await samplers.require(sampler_id, caller)
    return GetSamplerResponse(sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.model_path)


@router.post("/join_sampling_session", responses=describe(UnknownSampler))
async def join_sampling_session(
    request: JoinSamplingSessionRequest, samplers: Samplers, caller: Caller
) -> JoinSamplingSessionResponse:
    """Number one more client of a sampling session; random, so that no number repeats, not even after a restart."""
    await samplers.require(request.sampling_session_id, caller)
    return JoinSamplingSessionResponse(client_counter=1 + secrets.randbelow(MAX_CLIENTS))


@router.post(
    "/asample",
    response_model_exclude_none=True,
    responses=describe(UnknownSampler, SessionFinished, BadRequest, UnknownCheckpoint, UnknownBaseModel, Busy, *SUBMIT),
)
async def asample(
    operation: Annotated[Operation, Depends(Body("sample"))],
    server: Server,
    caller: Caller,
    response: Response,
) -> UntypedFuture:
    """Queue a sample. A request that is visibly invalid is answered 400; too many in flight, 429."""
    request = operation.request
    assert isinstance(request, SampleRequest)
    if request.sampling_session_id is None:
        weights = await find_weights(server.weights, request.base_model, request.model_path, caller)
        base_model = weights.base_model
        operation = replace(operation, lane=f"direct:{uuid.uuid4().hex}", seq_id=request.seq_id or 0)
    else:
        if request.base_model is not None or request.model_path is not None:
            raise BadRequest("give either sampling_session_id, or base_model or model_path")
        if request.seq_id is None:
            raise BadRequest("seq_id is missing: it identifies a sample of a sampling session")
        sampler = await server.samplers.require(operation.lane, caller)
        await server.sessions.require(sampler.session_id, caller, must_be_open=True)
        base_model = sampler.base_model
        params = request.sampling_params
        is_cut = sampler.directory is not None and (params.top_k > 0 or params.top_p < 1)
        if is_cut and server.samplers.warn_once(operation.lane):
            response.headers["x-deprecation-note"] = CUT
    base = server.models.base(base_model)
    chunks = request.prompt.chunks
    if len(chunks) <= QUICK_CHUNKS and all(isinstance(chunk, EncodedTextChunk) for chunk in chunks):
        base.check_sample(request)
    else:
        size = await off_loop(caller, LARGE, base.check_sample, request)  # it also parses images
        operation = replace(operation, image_bytes=size.pixel_bytes)
    request_id = await server.scheduler.samples.accept(operation)
    names = [ids.sequence_id(request_id, index) for index in range(request.num_samples)]
    return UntypedFuture(request_id=request_id, sample_sequence_ids=names)
