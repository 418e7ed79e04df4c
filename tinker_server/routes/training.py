"""Routes that create, describe and train models. Work is queued; its result is fetched with retrieve_future."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends

from api_schemas.futures import UntypedFuture
from api_schemas.old_clients.forward import ForwardRequest
from api_schemas.training import (
    CreateModelRequest,
    ForwardBackwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    ModelData,
    OptimizerConfig,
    OptimStepRequest,
    UnloadModelRequest,
)
from backends.protocol import BaseModelInfo
from tinker_server.errors import Busy, SessionFinished, UnknownBaseModel, UnknownModel, UnknownSession
from tinker_server.store.futures.records import UNLOAD_SUFFIX
from tinker_server.web.deps import Caller, Runs, ServedModels
from tinker_server.web.refusals import OF_MODEL, SUBMIT, refused
from tinker_server.web.submission import OwnModels, Submission, body_of

router = APIRouter()


@router.post(
    "/create_model",
    response_model_exclude_none=True,
    responses=refused(UnknownSession, SessionFinished, Busy, *SUBMIT),
)
async def create_model(
    submission: Annotated[Submission[CreateModelRequest], Depends(body_of("create_model"))],
    models: OwnModels,
) -> UntypedFuture:
    """Create a LoRA model. A repeat returns the first request_id."""
    request = submission.request
    return await models.accept_new(submission, request.session_id, request.model_seq_id)


@router.post("/get_info", responses=refused(UnknownModel, UnknownBaseModel))
async def get_info(request: GetInfoRequest, runs: Runs, caller: Caller, models: ServedModels) -> GetInfoResponse:
    """Return a model's base model, LoRA rank, tokenizer and optimizer."""
    run = await runs.require(request.model_id, caller)
    info = models.base(run.base_model).info
    return GetInfoResponse(
        model_id=run.model_id,
        is_lora=not run.trainable.full,
        lora_rank=run.trainable.lora_rank,
        model_name=info.name,
        model_data=ModelData(arch=info.arch, model_name=info.name, tokenizer_id=tokenizer_id(info)),
        optimizer_config=OptimizerConfig.model_validate(run.optimizer_config),
    )


@router.post("/forward_backward", response_model_exclude_none=True, responses=OF_MODEL)
async def forward_backward(
    submission: Annotated[Submission[ForwardBackwardRequest], Depends(body_of("forward_backward"))],
    models: OwnModels,
) -> UntypedFuture:
    """Add a loss's gradient to the model's, or (forward_only) only compute log probabilities."""
    request = submission.request
    return await models.accept(submission, request.model_id, request.seq_id)


@router.post("/forward", response_model_exclude_none=True, responses=OF_MODEL)
async def forward(
    submission: Annotated[Submission[ForwardRequest], Depends(body_of("forward"))],
    models: OwnModels,
) -> UntypedFuture:
    """Run forward_backward with forward_only, as clients before 0.25 ask for it."""
    request = submission.request
    return await models.accept(submission, request.model_id, request.seq_id)


@router.post("/unload_model", response_model_exclude_none=True, responses=OF_MODEL)
async def unload_model(
    submission: Annotated[Submission[UnloadModelRequest], Depends(body_of("unload_model"))],
    models: OwnModels,
) -> UntypedFuture:
    """Free a model's memory once its queued work is done. Saved weights are kept."""
    request = submission.request
    return await models.accept(submission, request.model_id, 0, UNLOAD_SUFFIX)


@router.post("/optim_step", response_model_exclude_none=True, responses=OF_MODEL)
async def optim_step(
    submission: Annotated[Submission[OptimStepRequest], Depends(body_of("optim_step"))],
    models: OwnModels,
) -> UntypedFuture:
    """Apply the model's gradient, then clear it."""
    request = submission.request
    return await models.accept(submission, request.model_id, request.seq_id)


def tokenizer_id(info: BaseModelInfo) -> str:
    """Return the hub id of the tokenizer. A base that is loaded from a directory of this machine has none, so its
    public name is returned, which may or may not be a hub id."""
    return info.name if Path(info.source).is_dir() and not Path(info.name).is_dir() else info.source
