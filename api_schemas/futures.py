"""Futures: the stored promises behind every slow operation (protocol section 5)."""

from typing import Literal

from pydantic import Field

from api_schemas.base import Request, Response


class UntypedFuture(Response):
    """Answers every submit at once."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    """One name per requested sample; only for /asample, where the SDK demands it."""


class RetrieveFutureRequest(Request):
    request_id: str
    allow_metadata_only: bool = False
    """The client takes a large result's size first, and then makes room for it."""


class RetrieveFuturePending(Response):
    """Body of the 408 that ends a held poll: ask again."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None


class FutureMetadata(Response):
    """Answers a poll for a large result that allows it, once: the result is there, and so large."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class SamplingSessionTarget(Request):
    """The samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=10**9)
    """Those whose seq_id is from this number times 10^9."""


class RetrieveFuturesRequest(Request):
    """What has finished since `prev_cursor`."""

    target: SamplingSessionTarget
    prev_cursor: int = Field(default=0, ge=0)
    """Of the previous answer; 0 starts from the beginning."""
    timeout: float | None = Field(default=None, ge=0)
    """Seconds to wait for something; absent: as long as the server holds polls. 0 only acknowledges."""
    retrieved_request_ids: list[str] = []
    """Results that the client has; the server deletes them."""


class FutureCompletion(Response):
    """One finished operation. Its result, also of a failed one, is fetched with retrieve_future."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Response):
    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(Request):
    request_id: str


class FutureFailed(Response):
    """The result of a failed operation, sent with status 200."""

    error: str
    category: Literal["user", "server", "unknown"]
