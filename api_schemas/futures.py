"""Futures: the stored promises behind every slow operation (protocol section 5)."""

from typing import Literal

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
    """The client could take a result's size first; we always answer in full."""


class RetrieveFuturePending(Response):
    """Body of the 408 that ends a held poll: ask again."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None


class FutureFailed(Response):
    """The result of a failed operation, sent with status 200."""

    error: str
    category: Literal["user", "server", "unknown"]
