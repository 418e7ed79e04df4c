"""Server-sent events that say that the viewer's data have changed. Pages then fetch the parts that they need."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import StreamingResponse

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.viewer import Viewing
from tinker_server.errors import Busy
from tinker_server.store.futures.notifications import Changes
from tinker_server.web.deps import Futures

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PAUSE_S = 2.0
"""Seconds between two events: a run may make hundreds of steps a second."""
QUIET_S = 20.0
"""Seconds without a change after which a comment is sent, so that proxies keep the connection open."""
MAX_OPEN = 64
"""Largest number of an owner's open streams."""


@router.get("/live")
async def live(
    viewer: Viewing,
    futures: Futures,
    since: float = math.inf,
    last_event_id: Annotated[float | None, Header()] = None,
) -> Response:
    """Stream events for as long as a page is open and shown.

    The first comes at once if anything has changed since the page was asked for, in `since`, or since the last event,
    whose id browsers send when they connect again. Both are in seconds since 1970.
    """
    if futures.changes.num_watching(viewer.owner) >= MAX_OPEN:
        raise Busy(f"{MAX_OPEN} pages of this owner are open, as many as are allowed; close one")
    events = _events(futures.changes, viewer.owner, since if last_event_id is None else last_event_id)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(changes: Changes, owner: str, since: float) -> AsyncIterator[str]:
    with changes.watching(owner, since) as watch:
        yield "retry: 3000\n\n"
        while not changes.is_released:
            changed = await watch.next(QUIET_S)
            yield f"event: changed\nid: {time.time()}\ndata: .\n\n" if changed else ": quiet\n\n"
            await asyncio.sleep(PAUSE_S)
