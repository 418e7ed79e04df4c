"""The administrators' page: all owners, their runs and keys. Every change is made by the API's own route."""

from fastapi import APIRouter, Request, Response

from tinker_server.api_schemas.owners import StopRunRequest, UnloadRunRequest
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.runs import PER_PAGE, Number, last_page
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Administrating, Viewer
from tinker_server.routes import owners as api
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/owners", route_class=PageRoute, include_in_schema=False)
HOURS = 24


@router.get("")
async def show_owners(request: Request, server: Server, viewer: Administrating, number: Number = 1) -> Response:
    """Show the whole page."""
    keys = await api.list_keys(server, viewer.owner)
    return page(
        request, "owners.html", {**await _now(server, viewer, number), "keys": keys.keys, "made": "", "made_for": ""}
    )


@router.get("/now")
async def show_now(request: Request, server: Server, viewer: Administrating, number: Number = 1) -> Response:
    """Show the part that changes."""
    return page(request, "owners_now.html", await _now(server, viewer, number))


@router.post("/runs/{run_id}/unload")
async def unload(request: Request, run_id: str, server: Server, viewer: Administrating, number: Number = 1) -> Response:
    """Move a run's model to disk."""
    await api.unload(UnloadRunRequest(run_id=run_id), server, viewer.owner)
    return page(request, "owners_now.html", await _now(server, viewer, number))


@router.post("/runs/{run_id}/stop")
async def stop(request: Request, run_id: str, server: Server, viewer: Administrating, number: Number = 1) -> Response:
    """End the session of a run."""
    await api.stop(StopRunRequest(run_id=run_id), server, viewer.owner)
    return page(request, "owners_now.html", await _now(server, viewer, number))


async def _now(server: Services, viewer: Viewer, number: int) -> dict[str, object]:
    runs = await api.list_runs(server, viewer.owner, None, PER_PAGE, (number - 1) * PER_PAGE)
    last = last_page(runs.cursor.total_count)
    if number > last:  # the runs of this page were deleted
        return await _now(server, viewer, last)
    owners = await api.list_owners(server, viewer.owner, HOURS)
    return {"owners": owners, "runs": runs, "number": number, "last_page": last}
