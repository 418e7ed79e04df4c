"""Futures, through which the results of slow operations are fetched (docs/protocol.md, Futures)."""

from typing import Annotated, Literal

from pydantic import Field

from tinker_server.api_schemas.base import FirstError, Request, Response
from tinker_server.api_schemas.fields import Integer, Real, RequestId, SamplingSessionId


class UntypedFuture(Response):
    """Immediate answer to every submitted operation."""

    request_id: RequestId
    model_id: str | None = None
    """The model of the operation."""
    sample_sequence_ids: list[str] | None = None
    """A name per requested sample; only for /asample, where the SDK demands it."""


class RetrieveFutureRequest(Request):
    """Ask for the result of an operation."""

    request_id: RequestId
    allow_metadata_only: bool = False
    """Whether the client accepts a large result's size first, so that it can make room."""


class RetrieveFuturePending(Response):
    """Body of the 408 that ends a held poll; the client polls again."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestId
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    """Whether the operation waits in the queue, or for capacity."""
    queue_state_reason: str | None = None
    """Reason for the wait."""


class FutureMetadata(Response):
    """Size of a finished large result, answered once to a poll that allows it."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int
    """Size of the result in bytes."""


class SamplingSessionTarget(Request):
    """The samples of a client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: SamplingSessionId
    cloned_sampler_id: Integer = Field(default=0, ge=0, le=10**9)
    """Number of the client. Its samples have a seq_id from this number times 10^9."""


class RetrieveFuturesRequest(Request):
    """Ask for the operations that have finished since `prev_cursor`."""

    target: SamplingSessionTarget
    """The samples that are asked about."""
    prev_cursor: Integer = Field(default=0, ge=0)
    """`cursor` of the previous answer; 0 starts from the beginning."""
    timeout: Real | None = Field(default=None, ge=0)
    """Seconds to wait for a result; absent: as long as the server holds polls. 0 only acknowledges."""
    retrieved_request_ids: Annotated[list[str], FirstError()] = []
    """Results that the client has received; the server deletes them."""


class FutureCompletion(Response):
    """A finished operation. Its result or failure is fetched with retrieve_future."""

    state: Literal["finished", "failed"]
    """Whether the operation has a result or a failure."""
    request_id: RequestId
    response_payload_uncompressed_size: int | None = None
    """Size of the result in bytes; null for a failed operation."""


class RetrieveFuturesResponse(Response):
    """The operations that have finished."""

    completions: list[FutureCompletion]
    """Operations in the order in which they finished."""
    cursor: int
    """Value for the next request's `prev_cursor`."""


class CancelFutureRequest(Request):
    """Cancel a sample that waits or runs."""

    request_id: RequestId


class FutureFailed(Response):
    """The result of a failed operation, sent with status 200."""

    error: str
    """Reason of the failure."""
    category: Literal["user", "server", "unknown"]
    """`user`: the request is at fault, and would fail again; `server`: this server is at fault."""
