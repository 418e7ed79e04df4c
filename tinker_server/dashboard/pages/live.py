"""Server-sent events: that something of the viewer's has changed. What it is, pages fetch as they need it."""

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
"""Between two events: a run may make hundreds of steps a second."""
QUIET_S = 20.0
"""After which a line is sent that says nothing, so that proxies keep the connection."""
MAX_OPEN = 64
"""Streams of one owner."""


@router.get("/live")
async def live(viewer: Viewing, futures: Futures) -> Response:
    """Held open for as long as a page is."""
    if futures.changes.num_watching(viewer.owner) >= MAX_OPEN:
        raise Busy(f"{MAX_OPEN} pages of this owner are open")
    return StreamingResponse(_events(futures.changes, viewer.owner), media_type="text/event-stream")


async def _events(changes: Changes, owner: str) -> AsyncIterator[str]:
    with changes.watching(owner) as watch:
        yield "retry: 3000\n\n"
        while not changes.is_released:
            changed = await watch.next(QUIET_S)
            yield "event: changed\ndata: .\n\n" if changed else ": quiet\n\n"
            await asyncio.sleep(PAUSE_S)
