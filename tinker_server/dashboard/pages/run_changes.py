"""Archives, restores and deletes the runs that are ticked in the table of runs."""

import time
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.checkpoints import KINDS
from tinker_server.dashboard.pages.runs import load_list
from tinker_server.dashboard.pages.runs_view import RunsView
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import Cancelled
from tinker_server.store.catalog import Page, Scope
from tinker_server.store.checkpoints import parse_path
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/runs", route_class=PageRoute, include_in_schema=False)
AT_ONCE = 100


Sent = Annotated[RunsView, Form()]


@router.post("/archive")
async def archive(request: Request, server: Server, viewer: Viewing, view: Sent) -> Response:
    """Leave runs out of the list."""
    for run_id in view.run:
        await server.runs.set_archived(run_id, viewer.owner, time.time())
    return await _answer(request, server, viewer, view)


@router.post("/restore")
async def restore(request: Request, server: Server, viewer: Viewing, view: Sent) -> Response:
    """List archived runs again."""
    for run_id in view.run:
        await server.runs.set_archived(run_id, viewer.owner, None)
    return await _answer(request, server, viewer, view)


@router.post("/delete")
async def delete(request: Request, server: Server, viewer: Viewing, view: Sent) -> Response:
    """Delete runs with their models, checkpoints, curves, metrics and samples."""
    for run_id in view.run:
        await server.runs.require(run_id, viewer.owner)
    for run_id in view.run:
        await _delete(server, run_id, viewer.owner)
    return await _answer(request, server, viewer, view)


async def _delete(server: Services, run_id: str, owner: str) -> None:
    server.audit.admit(owner)
    server.scheduler.cancel_waiting({run_id}, Cancelled("its run was deleted"))
    if (await server.runs.require(run_id, owner)).status != "lost":
        await server.scheduler.drop(run_id)
        server.scheduler.forget(run_id)
    while True:
        found, _ = await server.catalog.checkpoints(Page(Scope(owner), AT_ONCE, 0), KINDS, time.time(), run_id)
        if not found:
            break
        for saved in found:
            await server.storage.delete(await server.checkpoints.take(parse_path(saved.tinker_path), owner))
    await server.runs.delete(run_id, owner)
    server.batches.forget(run_id)
    server.gallery.drop_run(owner, run_id)
    await server.audit.note("run_deleted", owner, model_id=run_id)


async def _answer(request: Request, server: Services, viewer: Viewer, view: RunsView) -> Response:
    server.futures.changes.note(viewer.owner)
    return page(request, "runs_list.html", await load_list(server, viewer, view.model_copy(update={"run": []})))
