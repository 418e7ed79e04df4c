"""Routes that save and load weights."""

from typing import Annotated

from fastapi import APIRouter, Depends

from api_schemas.futures import UntypedFuture
from api_schemas.weights import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinker_server.errors import BadRequest, Busy, SessionFinished, UnknownModel, UnknownSession
from tinker_server.web.refusals import OF_MODEL, SUBMIT, refused
from tinker_server.web.submission import OwnModels, Submission, body_of

router = APIRouter()


@router.post("/save_weights", response_model_exclude_none=True, responses=OF_MODEL)
async def save_weights(
    submission: Annotated[Submission[SaveWeightsRequest], Depends(body_of("save_weights"))],
    models: OwnModels,
) -> UntypedFuture:
    """Save a training checkpoint."""
    request = submission.request
    return await models.accept(submission, request.model_id, request.seq_id)


@router.post("/save_weights_for_sampler", response_model_exclude_none=True, responses=OF_MODEL)
async def save_weights_for_sampler(
    submission: Annotated[Submission[SaveWeightsForSamplerRequest], Depends(body_of("save_weights_for_sampler"))],
    models: OwnModels,
) -> UntypedFuture:
    """Save weights to sample from."""
    request = submission.request
    return await models.accept(submission, request.model_id, request.seq_id)


@router.post("/save_weights_external", response_model_exclude_none=True, responses=OF_MODEL)
async def save_weights_external(
    submission: Annotated[Submission[SaveWeightsExternalRequest], Depends(body_of("save_weights_external"))],
    models: OwnModels,
) -> UntypedFuture:
    """Save the adapter for download."""
    request = submission.request
    return await models.accept(submission, request.model_id, request.seq_id)


@router.post(
    "/load_weights",
    response_model_exclude_none=True,
    responses=refused(BadRequest, UnknownSession, UnknownModel, SessionFinished, Busy, *SUBMIT),
)
async def load_weights(
    submission: Annotated[Submission[LoadWeightsRequest], Depends(body_of("load_weights"))],
    models: OwnModels,
) -> UntypedFuture:
    """Create a model from a checkpoint (session_id, model_seq_id), or load one into a model (model_id, seq_id)."""
    request = submission.request
    if request.weights_access_token is not None:  # another owner's API key, which is never stored
        seal = models.server.keys.sealed(request.weights_access_token)
        submission = submission.with_request(request.model_copy(update={"weights_access_token": seal}))
    match request.session_id, request.model_seq_id, request.model_id, request.seq_id:
        case str(session_id), int(model_seq_id), None, None:
            return await models.accept_new(submission, session_id, model_seq_id)
        case None, None, str(model_id), int(seq_id):
            return await models.accept(submission, model_id, seq_id)
        case _:
            raise BadRequest("load_weights takes either session_id and model_seq_id, or model_id and seq_id")
