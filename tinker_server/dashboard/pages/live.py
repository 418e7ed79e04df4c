"""Server-sent events that say that the viewer's data have changed. Pages then fetch the parts that they need."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
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
async def live(viewer: Viewing, futures: Futures) -> Response:
    """Stream events for as long as a page is open."""
    if futures.changes.num_watching(viewer.owner) >= MAX_OPEN:
        raise Busy(f"{MAX_OPEN} pages of this owner are open, as many as are allowed; close one")
    return StreamingResponse(_events(futures.changes, viewer.owner), media_type="text/event-stream")


async def _events(changes: Changes, owner: str) -> AsyncIterator[str]:
    with changes.watching(owner) as watch:
        yield "retry: 3000\n\n"
        while not changes.is_released:
            changed = await watch.next(QUIET_S)
            yield "event: changed\ndata: .\n\n" if changed else ": quiet\n\n"
            await asyncio.sleep(PAUSE_S)
