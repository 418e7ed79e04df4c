"""Futures: how the result of a slow operation is fetched (docs/protocol.md, Futures)."""

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import FirstError, Request, Response
from api_schemas.fields import Integer, Real, RequestId, SamplingSessionId


class UntypedFuture(Response):
    """Answers every submit at once."""

    request_id: RequestId
    model_id: str | None = None
    """The model of the operation."""
    sample_sequence_ids: list[str] | None = None
    """One name per requested sample; only for /asample, where the SDK demands it."""


class RetrieveFutureRequest(Request):
    """Ask for the result of an operation."""

    request_id: RequestId
    allow_metadata_only: bool = False
    """The client takes a large result's size first, and then makes room for it."""


class RetrieveFuturePending(Response):
    """Body of the 408 that ends a held poll: ask again."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestId
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    """Whether the operation waits its turn or for room."""
    queue_state_reason: str | None = None
    """Why it waits."""


class FutureMetadata(Response):
    """Answers a poll for a large result that allows it, once: the result is there, and so large."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int
    """Bytes of the result."""


class SamplingSessionTarget(Request):
    """The samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: SamplingSessionId
    cloned_sampler_id: Integer = Field(default=0, ge=0, le=10**9)
    """Those whose seq_id is from this number times 10^9."""


class RetrieveFuturesRequest(Request):
    """What has finished since `prev_cursor`."""

    target: SamplingSessionTarget
    """Whose results."""
    prev_cursor: Integer = Field(default=0, ge=0)
    """Of the previous answer; 0 starts from the beginning."""
    timeout: Real | None = Field(default=None, ge=0)
    """Seconds to wait for something; absent: as long as the server holds polls. 0 only acknowledges."""
    retrieved_request_ids: Annotated[list[str], FirstError()] = []
    """Results that the client has; the server deletes them."""


class FutureCompletion(Response):
    """One finished operation. Its result, also of a failed one, is fetched with retrieve_future."""

    state: Literal["finished", "failed"]
    """Whether there is a result or a failure."""
    request_id: RequestId
    response_payload_uncompressed_size: int | None = None
    """Bytes of the result; of a failed operation, null."""


class RetrieveFuturesResponse(Response):
    """What has finished."""

    completions: list[FutureCompletion]
    """In the order it did."""
    cursor: int
    """The next request's `prev_cursor`."""


class CancelFutureRequest(Request):
    """Stop a sample that waits or runs."""

    request_id: RequestId


class FutureFailed(Response):
    """The result of a failed operation, sent with status 200."""

    error: str
    """Why the operation failed."""
    category: Literal["user", "server", "unknown"]
    """`user`: the request is at fault, and would fail again; `server`: this server is."""
