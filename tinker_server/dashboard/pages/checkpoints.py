"""Saved weights: the list of one run, and the page of all runs. Every change is made by the API's own route."""

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Form, Query, Request, Response

from tinker_server.api_schemas.checkpoints import SetTtlRequest
from tinker_server.api_schemas.weights import Kind, TinkerPath
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.runs import PER_PAGE, Number, find_titles, last_page
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.routes import checkpoints as api
from tinker_server.store.catalog import Page, Scope
from tinker_server.store.checkpoints import parse_path
from tinker_server.web.deps import Server, ServerUrl, Services

router = APIRouter(route_class=PageRoute, include_in_schema=False)
OF_RUN = "/runs/{run_id}/checkpoints"
ONE = OF_RUN + "/{kind}/{name}"
MOST = 200
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
NEVER = 0


async def _path(run_id: str, kind: str, name: str) -> TinkerPath:
    return parse_path(f"tinker://{run_id}/{kind}/{name}")


CheckpointPath = Annotated[TinkerPath, Depends(_path)]


@router.get("/checkpoints")
async def show_all(  # noqa: PLR0913 - one for each parameter of the query
    request: Request,
    server: Server,
    viewer: Viewing,
    kind: Literal["", Kind] = "",
    run: Annotated[str, Query(max_length=200)] = "",
    number: Number = 1,
) -> Response:
    """Show one page of the checkpoints of all runs, newest first; `kind` and `run` select some."""
    asked = Page(Scope(viewer.owner), PER_PAGE, (number - 1) * PER_PAGE)
    found, total = await server.catalog.checkpoints(asked, [kind] if kind else KINDS, time.time(), run or None)
    if number > last_page(total):  # the weights of this page were deleted
        return await show_all(request, server, viewer, kind, run, last_page(total))
    titles = await find_titles(server, viewer)
    filters = {"kinds": KINDS, "kind": kind, "run": run, "titles": ({run: ""} if run else {}) | titles}
    values = {"checkpoints": found, "total": total, "number": number, "last_page": last_page(total)}
    return page(request, "checkpoints.html", {**values, **filters})


@router.get(OF_RUN)
async def show(request: Request, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the list, newest first."""
    await server.runs.require(run_id, viewer.owner)
    return await _listed(request, run_id, server, viewer)


@router.post(ONE + "/publish")
async def publish(request: Request, path: CheckpointPath, server: Server, viewer: Viewing) -> Response:
    """Let every client load the weights."""
    await api.publish(path, server.checkpoints, server.audit, viewer.owner)
    return await _listed(request, path.run_id, server, viewer)


@router.delete(ONE + "/publish")
async def unpublish(request: Request, path: CheckpointPath, server: Server, viewer: Viewing) -> Response:
    """Undo publish."""
    await api.unpublish(path, server.checkpoints, server.audit, viewer.owner)
    return await _listed(request, path.run_id, server, viewer)


@router.post(ONE + "/expiry")
async def set_expiry(
    request: Request, path: CheckpointPath, server: Server, viewer: Viewing, seconds: Annotated[int, Form()]
) -> Response:
    """Set the seconds from now after which the weights expire; 0: never."""
    asked = SetTtlRequest.model_construct(ttl_seconds=None if seconds == NEVER else seconds)  # set_ttl checks it
    await api.set_ttl(path, asked, server.checkpoints, server.audit, viewer.owner)
    return await _listed(request, path.run_id, server, viewer)


@router.get(ONE + "/download")
async def download(path: CheckpointPath, server: Server, viewer: Viewing, url: ServerUrl) -> Response:
    """Redirect to a link to the weights as one tar.gz, valid for an hour."""
    return await api.archive(path, server, url, viewer.owner)


@router.delete(ONE)
async def delete(request: Request, path: CheckpointPath, server: Server, viewer: Viewing) -> Response:
    """Delete the weights and their files."""
    await api.delete(path, server, viewer.owner)
    return await _listed(request, path.run_id, server, viewer)


async def _listed(request: Request, run_id: str, server: Services, viewer: Viewer) -> Response:
    asked = Page(Scope(viewer.owner), MOST, 0)
    found, total = await server.catalog.checkpoints(asked, KINDS, time.time(), run_id)
    return page(request, "run_checkpoints.html", {"run_id": run_id, "checkpoints": found, "total": total})
