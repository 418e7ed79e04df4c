"""The marks on a run's curves: saved weights, evaluations, and restarts of server and trainer."""

import re
import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.checkpoints import KINDS
from tinker_server.dashboard.pages.curves import MOST
from tinker_server.dashboard.viewer import Viewing
from tinker_server.store.catalog import Page, Scope
from tinker_server.web.deps import Server

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
MOST_SAVES, MOST_METRICS = 100, 4
"""Newest saves that are marked, and metrics whose evaluations are."""
EVALUATION = re.compile(r"^(test|eval|val|valid|validation)[/_]", re.IGNORECASE)


@router.get("/marks.json")
async def marks(run_id: str, server: Server, viewer: Viewing) -> JSONResponse:
    """Return each mark with its step, where it has one, and its time."""
    run = await server.runs.require(run_id, viewer.owner)
    saved, _ = await server.catalog.checkpoints(Page(Scope(viewer.owner), MOST_SAVES, 0), KINDS, time.time(), run_id)
    of_operations = [(save, save.saved_as) for save in saved if save.saved_as is not None]
    steps = await server.steps.steps_at_saves(run_id, MOST_SAVES)
    names = [name for name in await server.client_metrics.names(run_id) if EVALUATION.search(name)][:MOST_METRICS]
    last = await server.client_metrics.last_step(run_id) or 0
    points = await server.client_metrics.points(run_id, names, (0, last), MOST)
    evaluated = {point.step: point.at for of in points.values() for point in of}
    newest = await server.steps.last(run_id)
    history, until = server.machine_history, run.created_at if newest is None else newest.at
    starts = await history.server_starts(run.created_at, until)
    restarts = await history.trainer_restarts(run.base_model, run.created_at, until)
    found = {
        "saves": [
            {"step": steps.get(number, 0), "at": save.created_at, "name": f"{save.kind}/{save.name}"}
            for save, number in of_operations
        ],
        "evaluations": [{"step": step, "at": at} for step, at in sorted(evaluated.items())],
        "server_restarts": [{"at": at} for at in starts],
        "trainer_restarts": [{"at": at} for at in restarts],
    }
    return JSONResponse(found)
