"""Routes that save and load weights."""

from typing import Annotated

from fastapi import APIRouter, Depends

from tinker_server.api_schemas.futures import UntypedFuture
from tinker_server.api_schemas.weights import (
    LoadWeightsRequest,
)
from tinker_server.errors import BadRequest, Busy, SessionFinished, UnknownModel, UnknownSession
from tinker_server.store.futures.records import Operation
from tinker_server.web.refusals import OF_MODEL, SUBMIT, describe
from tinker_server.web.submission import Body, OwnModels, with_request

router = APIRouter()


@router.post("/save_weights", response_model_exclude_none=True, responses=OF_MODEL)
async def save_weights(
    operation: Annotated[Operation, Depends(Body("save_weights"))], models: OwnModels
) -> UntypedFuture:
    """Save a training checkpoint."""
    return await models.accept(operation)


@router.post("/save_weights_for_sampler", response_model_exclude_none=True, responses=OF_MODEL)
async def save_weights_for_sampler(
    operation: Annotated[Operation, Depends(Body("save_weights_for_sampler"))], models: OwnModels
) -> UntypedFuture:
    """Save weights to sample from."""
    return await models.accept(operation)


@router.post("/save_weights_external", response_model_exclude_none=True, responses=OF_MODEL)
async def save_weights_external(
    operation: Annotated[Operation, Depends(Body("save_weights_external"))], models: OwnModels
) -> UntypedFuture:
    """Save the adapter for download."""
    return await models.accept(operation)


@router.post(
    "/load_weights",
    response_model_exclude_none=True,
    responses=describe(BadRequest, UnknownSession, UnknownModel, SessionFinished, Busy, *SUBMIT),
)
async def load_weights(
    operation: Annotated[Operation, Depends(Body("load_weights"))], models: OwnModels
) -> UntypedFuture:
    """Create a model from a checkpoint (session_id, model_seq_id), or load one into a model (model_id, seq_id)."""
    request = operation.request
    assert isinstance(request, LoadWeightsRequest)
    if request.weights_access_token is not None:  # another owner's API key, which is never stored
        seal = models.server.keys.seal(request.weights_access_token)
        operation = with_request(operation, request.model_copy(update={"weights_access_token": seal}))
    if request.session_id is not None:
        return await models.accept_new(operation, request.session_id)
    return await models.accept(operation)
