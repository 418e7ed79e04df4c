"""Routes that fetch results by long poll, each by itself or per sampling session, and cancel samples."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from tinker_server.api_schemas import wire
from tinker_server.api_schemas.futures import (
    CancelFutureRequest,
    FutureCompletion,
    FutureFailed,
    FutureMetadata,
    RetrieveFuturePending,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
)
from tinker_server.api_schemas.old_clients import results
from tinker_server.api_schemas.training import CreateModelResponse, OptimStepResponse, UnloadModelResponse
from tinker_server.api_schemas.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinker_server.errors import BadRequest, ResultExpired, UnknownFuture, UnknownSampler
from tinker_server.offload import INLINE_BYTES, LARGE, off_loop
from tinker_server.operations.table import OPERATIONS
from tinker_server.store.futures.notifications import Target
from tinker_server.store.futures.records import Result
from tinker_server.web.deps import AppSettings, Caller, Futures, KnownKey, Samplers, SchedulerDep, Server
from tinker_server.web.refusals import BINARY, Described, describe

router = APIRouter()
LARGE_RESULT_BYTES = 1 << 20
SLICE_BYTES = 1 << 18
"""Bytes of a result that are given to the connection at once: a client may read slowly, or not at all. Larger results
are counted while they are sent."""
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
ACCEPT = "`application/x-protobuf` asks for protobuf where a result has such a form; other results are JSON."
RESULT: Described = {
    200: {
        "description": "The result: forward_backward and samples as protobuf (messages ForwardBackwardOutput and "
        "SampleResponse of tinker_wire.proto) if the client accepts it, everything else as JSON. A failed operation "
        "gives a FutureFailed. FutureMetadata is sent once, before a large result, if the request allows it.",
        "model": CreateModelResponse
        | UnloadModelResponse
        | LoadWeightsResponse
        | results.ForwardBackwardJson
        | OptimStepResponse
        | results.SampleJson
        | SaveWeightsResponse
        | SaveWeightsForSamplerResponse
        | SaveWeightsExternalResponse
        | FutureMetadata
        | FutureFailed,
        "content": {wire.PROTOBUF: {"schema": BINARY}},
    }
}
PENDING: Described = {
    408: {"description": "There is no result yet: ask again at once.", "model": RetrieveFuturePending}
}


async def _until_sent() -> AsyncIterator[AsyncExitStack]:
    """Yield a stack, which is closed once the answer was sent."""
    async with AsyncExitStack() as held:
        yield held


UntilSent = Annotated[AsyncExitStack, Depends(_until_sent)]


@router.post("/retrieve_future", responses=RESULT | PENDING | describe(UnknownFuture, ResultExpired))
async def retrieve_future(
    poll: RetrieveFutureRequest,
    server: Server,
    key: KnownKey,
    sending: UntilSent,
    accept: Annotated[str, Header(description=ACCEPT)] = "",
) -> Response:
    """Return the stored bytes as soon as they exist; 408 after a while without them, and the client asks again."""
    request_id = _require_id(poll.request_id)
    if key.scope == "sample":
        await server.futures.require_sample(request_id)

    async def admit(size_bytes: int) -> None:
        if size_bytes > SLICE_BYTES:
            await sending.enter_async_context(server.ledger.result(key.name, size_bytes))

    result = await server.futures.wait(request_id, key.name, server.settings.poll_hold_s, admit)
    if result is None:
        unfinished = server.futures.queue.get(request_id)
        waits_for = None if unfinished is None else server.scheduler.waits_for(unfinished.lane)
        state: Literal["active", "paused_capacity"] = "active" if waits_for is None else "paused_capacity"
        pending = RetrieveFuturePending(request_id=request_id, queue_state=state, queue_state_reason=waits_for)
        return Response(pending.model_dump_json(exclude_none=True), 408, media_type="application/json")
    size_bytes = len(result.body)
    is_protobuf = result.content_type == wire.PROTOBUF and wire.PROTOBUF in accept
    is_large = is_protobuf and size_bytes > LARGE_RESULT_BYTES
    if is_large and poll.allow_metadata_only and server.futures.first_time_large(request_id):
        metadata = FutureMetadata(response_payload_size=size_bytes)
        return Response(metadata.model_dump_json(), media_type="application/json")
    answer = _answer(result, is_protobuf, key.name)
    answer.background = BackgroundTask(server.futures.note_sent, request_id, result)  # after the last byte
    return answer


@router.post("/retrieve_futures", response_model_exclude_none=True, responses=describe(UnknownSampler))
async def retrieve_futures(
    poll: RetrieveFuturesRequest, futures: Futures, samplers: Samplers, settings: AppSettings, caller: Caller
) -> RetrieveFuturesResponse:
    """List the samples of a client that finished since its last poll, and acknowledge results.

    The poll is held until an operation has finished.
    """
    session_id = poll.target.sampling_session_id
    await samplers.require(session_id, caller)
    futures.acknowledge(session_id, poll.retrieved_request_ids)
    hold_s = settings.poll_hold_s if poll.timeout is None else min(poll.timeout, settings.poll_hold_s)
    target = Target(session_id, poll.target.cloned_sampler_id)
    completed = await futures.completions.after(target, poll.prev_cursor, hold_s)
    return RetrieveFuturesResponse(
        completions=[
            FutureCompletion(state="failed", request_id=future.request_id)
            if future.failed
            else FutureCompletion(
                state="finished", request_id=future.request_id, response_payload_uncompressed_size=future.size_bytes
            )
            for future in completed
        ],
        cursor=completed[-1].cursor if completed else poll.prev_cursor,
    )


@router.post("/cancel_future", status_code=204, responses=describe(UnknownFuture, BadRequest))
async def cancel_future(
    request: CancelFutureRequest, futures: Futures, scheduler: SchedulerDep, caller: Caller
) -> Response:
    """Cancel a sample that waits or runs. One that has ended, or was cancelled before, is unchanged."""
    request_id = _require_id(request.request_id)
    if not scheduler.samples.cancel(request_id, caller):
        await futures.require_finished_sample(request_id, caller)
    return Response(status_code=204)


def _answer(result: Result, is_protobuf: bool, owner: str) -> Response:
    """Return the whole result in the form that its client accepts."""
    if result.content_type != wire.PROTOBUF:
        return Response(result.body, media_type=result.content_type)
    if not is_protobuf:
        return _json_form(result, owner)
    size_bytes = len(result.body)
    if size_bytes <= SLICE_BYTES:
        return Response(result.body, media_type=wire.PROTOBUF)
    return StreamingResponse(
        _slices(result.body), media_type=wire.PROTOBUF, headers={"Content-Length": str(size_bytes)}
    )


def _require_id(request_id: str) -> str:
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise UnknownFuture(f"no operation has the request_id {request_id[:64]!r}")
    return request_id


def _json_form(result: Result, owner: str) -> Response:
    """Convert a protobuf result for clients that accept no protobuf; a large result is encoded while it is sent."""
    json_form = OPERATIONS[result.operation_kind].json_form
    assert json_form is not None, f"{result.operation_kind} has a result in protobuf"
    parts = json_form(result.body)
    if len(result.body) <= INLINE_BYTES:
        return Response(b"".join(parts), media_type="application/json")
    return StreamingResponse(_one_by_one(parts, owner), media_type="application/json")


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), SLICE_BYTES):
        yield body[begin : begin + SLICE_BYTES]


async def _one_by_one(parts: Iterator[bytes], owner: str) -> AsyncIterator[bytes]:
    while True:
        part = await off_loop(owner, LARGE, next, parts, None)
        if part is None:
            return
        yield part
