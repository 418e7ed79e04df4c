"""Redirects from the paths of the addresses that the SDK prints, to the pages that show the same thing here."""

import time
from urllib.parse import urlencode

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.checkpoints import CheckpointPath
from tinker_server.dashboard.rendering import base_of
from tinker_server.dashboard.viewer import Viewing
from tinker_server.web.deps import Server

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/sessions")
async def sessions(request: Request, _: Viewing) -> Response:
    """Redirect to all runs: there is no page of sessions."""
    return _to(request, "/")


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str, server: Server, viewer: Viewing) -> Response:
    """Redirect to the runs of a session, which have its id in theirs."""
    await server.sessions.require(session_id, viewer.owner)
    return _to(request, "/", q=session_id)


@router.get("/training_runs/{run_id}")
async def training_run(request: Request, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Redirect to a run's page."""
    await server.runs.require(run_id, viewer.owner)
    return _to(request, f"/runs/{run_id}")


@router.get("/checkpoints/{run_id}/{kind}/{name}")
async def checkpoint(request: Request, path: CheckpointPath, server: Server, viewer: Viewing) -> Response:
    """Redirect to the checkpoints of the same run and kind."""
    await server.checkpoints.require(path, viewer.owner, time.time())
    return _to(request, "/checkpoints", kind=path.kind, run=path.run_id)


@router.get("/keys")
@router.get("/keys/{key_id}")
async def keys(request: Request, viewer: Viewing) -> Response:
    """Redirect administrators to the list of keys, which nobody else sees."""
    if not viewer.is_admin:
        raise HTTPException(404, "API keys are made on the server's machine, with tinker-server keys add NAME.")
    return _to(request, "/owners")


def _to(request: Request, path: str, **query: str) -> Response:
    return RedirectResponse(f"{base_of(request)}{path}{'?' if query else ''}{urlencode(query)}", 303)
