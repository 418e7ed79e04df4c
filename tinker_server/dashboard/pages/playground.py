"""The playground: chats with any base model or sampler weights, two side by side."""

import time

from fastapi import APIRouter, Request, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewing
from tinker_server.store.catalog import Page, Scope
from tinker_server.web.deps import Server

router = APIRouter(prefix="/playground", route_class=PageRoute, include_in_schema=False)
OFFERED = 100


@router.get("")
async def show_playground(request: Request, server: Server, viewer: Viewing) -> Response:
    """Show the page; the browser then calls the chat endpoint itself."""
    asked = Page(Scope(viewer.owner), OFFERED, 0)
    saved, _ = await server.catalog.checkpoints(asked, ["sampler_weights"], time.time())
    served = server.models.served
    bases = [(name, base.info.takes_images) for name, base in served.items()]
    return page(request, "playground.html", {"bases": bases, "saved": saved})
