"""Routes that create, describe and train models. Work is queued; its result is fetched with retrieve_future."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends

from tinker_server.api_schemas.futures import UntypedFuture
from tinker_server.api_schemas.training import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    ModelData,
    OptimizerConfig,
)
from tinker_server.backends.protocol import BaseModelInfo
from tinker_server.errors import Busy, SessionFinished, UnknownBaseModel, UnknownModel, UnknownSession
from tinker_server.store.futures.records import Operation
from tinker_server.web.deps import Caller, Runs, ServedModels
from tinker_server.web.refusals import OF_MODEL, SUBMIT, describe
from tinker_server.web.submission import Body, OwnModels

router = APIRouter()


@router.post(
    "/create_model",
    response_model_exclude_none=True,
    responses=describe(UnknownSession, SessionFinished, Busy, *SUBMIT),
)
async def create_model(
    operation: Annotated[Operation, Depends(Body("create_model"))], models: OwnModels
) -> UntypedFuture:
    """Create a LoRA model. A repeat returns the first request_id."""
    request = operation.request
    assert isinstance(request, CreateModelRequest)
    return await models.accept_new(operation, request.session_id)


@router.post("/get_info", responses=describe(UnknownModel, UnknownBaseModel))
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
    operation: Annotated[Operation, Depends(Body("forward_backward"))], models: OwnModels
) -> UntypedFuture:
    """Add a loss's gradient to the model's, or (forward_only) only compute log probabilities."""
    return await models.accept(operation)


@router.post("/forward", response_model_exclude_none=True, responses=OF_MODEL)
async def forward(operation: Annotated[Operation, Depends(Body("forward"))], models: OwnModels) -> UntypedFuture:
    """Run forward_backward with forward_only, as clients before 0.25 ask for it."""
    return await models.accept(operation)


@router.post("/unload_model", response_model_exclude_none=True, responses=OF_MODEL)
async def unload_model(
    operation: Annotated[Operation, Depends(Body("unload_model"))], models: OwnModels
) -> UntypedFuture:
    """Free a model's memory once its queued work is done. Saved weights are kept."""
    return await models.accept(operation)


@router.post("/optim_step", response_model_exclude_none=True, responses=OF_MODEL)
async def optim_step(operation: Annotated[Operation, Depends(Body("optim_step"))], models: OwnModels) -> UntypedFuture:
    """Apply the model's gradient, then clear it."""
    return await models.accept(operation)


def tokenizer_id(info: BaseModelInfo) -> str:
    """Return the hub id of the tokenizer. A base that is loaded from a directory of this machine has none, so its
    public name is returned, which may or may not be a hub id."""
    return info.name if Path(info.source).is_dir() and not Path(info.name).is_dir() else info.source
