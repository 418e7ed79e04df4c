"""The playground: chats with any base model or sampler weights, two side by side."""

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.texts import LIKELY
from tinker_server.dashboard.viewer import Viewing
from tinker_server.store.catalog import Page, Scope
from tinker_server.web.deps import Server

router = APIRouter(prefix="/playground", route_class=PageRoute, include_in_schema=False)
OFFERED = 100
"""Saved weights that the page offers, the newest; any other path can be typed."""
Chosen = Annotated[str, Query(max_length=1000)]


@router.get("")
async def show_playground(
    request: Request, server: Server, viewer: Viewing, model_path: Chosen = "", checkpoint: Chosen = ""
) -> Response:
    """Show the page; the browser then calls the chat endpoint itself.

    The weights chosen at first are `model_path`, or `checkpoint` as in the address that the SDK prints.
    """
    asked = Page(Scope(viewer.owner), OFFERED, 0)
    saved, _ = await server.catalog.checkpoints(asked, ["sampler_weights"], time.time())
    bases = list(server.models.served)
    values = {"bases": bases, "saved": saved, "chosen": model_path or checkpoint, "likely": LIKELY}
    return page(request, "playground.html", values | {"offered": {*bases, *(one.tinker_path for one in saved)}})
