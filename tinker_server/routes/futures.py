"""Fetching results by long poll."""

from fastapi import APIRouter, Response

from api_schemas.futures import RetrieveFuturePending, RetrieveFutureRequest
from tinker_server.deps import AppSettings, Futures

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(poll: RetrieveFutureRequest, futures: Futures, settings: AppSettings) -> Response:
    """The stored bytes as soon as they are there; after a while without them, 408, which means to ask again."""
    result = await futures.wait(poll.request_id, settings.poll_hold_s)
    if result is not None:
        return Response(result.body, media_type=result.content_type)
    pending = RetrieveFuturePending(request_id=poll.request_id)
    return Response(pending.model_dump_json(exclude_none=True), 408, media_type="application/json")
