"""Sampling sessions, and samples from them."""

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Depends

from api_schemas.futures import UntypedFuture
from api_schemas.inputs import EncodedTextChunk
from api_schemas.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
)
from api_schemas.weights import TinkerPath
from tinker_server.db.tables import SamplingSession
from tinker_server.deps import Checkpoints, Samplers, ServedModels, Sessions, Work
from tinker_server.errors import BadRequest
from tinker_server.routes.submission import Submission, json_body

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: CreateSamplingSessionRequest,
    sessions: Sessions,
    samplers: Samplers,
    checkpoints: Checkpoints,
    models: ServedModels,
) -> CreateSamplingSessionResponse:
    """Bind a sampling session to a base model or to saved weights, which are loaded when first used."""
    await sessions.require_open(request.session_id)
    base_model, directory = request.base_model, None
    if request.model_path is not None:
        checkpoint = await checkpoints.require(_sampler_path(request.model_path), time.time())
        if base_model not in (None, checkpoint.base_model):
            raise BadRequest(f"{request.model_path} is of {checkpoint.base_model}, not of {base_model}")
        base_model, directory = checkpoint.base_model, checkpoint.directory
    if base_model is None:
        raise BadRequest("give base_model or model_path")
    models.base(base_model)
    sampler = SamplingSession(
        sampling_session_id=f"{request.session_id}:sample:{request.sampling_session_seq_id}",
        session_id=request.session_id,
        base_model=base_model,
        model_path=request.model_path,
        directory=directory,
        created_at=time.time(),
    )
    return CreateSamplingSessionResponse(sampling_session_id=await samplers.create(sampler))


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, samplers: Samplers) -> GetSamplerResponse:
    """What a sampling session samples from."""
    sampler = await samplers.require(sampler_id)
    return GetSamplerResponse(sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.model_path)


@router.post("/asample", response_model_exclude_none=True)
async def asample(
    submission: Annotated[Submission[SampleRequest], Depends(json_body(SampleRequest))],
    sessions: Sessions,
    samplers: Samplers,
    models: ServedModels,
    work: Work,
) -> UntypedFuture:
    """Draw samples. What can be told to be wrong at once is answered 400."""
    request = submission.request
    refuse_unbuilt(request)
    if request.sampling_session_id is None or request.seq_id is None:
        raise BadRequest("sampling_session_id and seq_id are missing")
    sampler = await samplers.require(request.sampling_session_id)
    await sessions.require_open(sampler.session_id)
    check = models.base(sampler.base_model).check_sample
    if all(isinstance(chunk, EncodedTextChunk) for chunk in request.prompt.chunks):
        check(request)
    else:
        await asyncio.to_thread(check, request)  # it looks into images
    future = await submission.accept(work, "sample", request.sampling_session_id, request.seq_id)
    names = [f"{future.request_id}:{index}" for index in range(request.num_samples)]
    return future.model_copy(update={"sample_sequence_ids": names})


def refuse_unbuilt(request: SampleRequest) -> None:
    """The one list of what requests may hold and this server does not do."""
    asked = {
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0,
        "record_stability_info": request.record_stability_info,
        "base_model (create a sampling session)": request.base_model is not None,
        "model_path (create a sampling session)": request.model_path is not None,
    }
    if refused := [name for name, is_asked in asked.items() if is_asked]:
        raise BadRequest(f"not supported: {', '.join(refused)}")


def _sampler_path(text: str) -> TinkerPath:
    try:
        path = TinkerPath.parse(text)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if path.kind != "sampler_weights":
        raise BadRequest(f"{text} cannot be sampled from; take a .../sampler_weights/<name> (save_weights_for_sampler)")
    return path
