"""The playground: chats with any base model or sampler weights, two side by side."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.runs import find_titles
from tinker_server.dashboard.rendering import page, short
from tinker_server.dashboard.texts import LIKELY
from tinker_server.dashboard.viewer import Viewing
from tinker_server.operations.recording import is_optim_step
from tinker_server.store.catalog import Page, Scope
from tinker_server.web.deps import Server

router = APIRouter(prefix="/playground", route_class=PageRoute, include_in_schema=False)
OFFERED = 100
"""Saved weights that the page offers, the newest; any other path can be typed."""
STEPS_SHOWN = 50
Chosen = Annotated[str, Query(max_length=1000)]


async def _chosen(model_path: Chosen = "", checkpoint: Chosen = "") -> str:
    """Return the weights chosen at first: `model_path`, or `checkpoint` as in the address that the SDK prints."""
    return model_path or checkpoint


@router.get("")
async def show_playground(
    request: Request, server: Server, viewer: Viewing, chosen: Annotated[str, Depends(_chosen)], run: Chosen = ""
) -> Response:
    """Show the page; the browser then calls the chat endpoint itself. `run`: the run whose steps it offers first."""
    asked = Page(Scope(viewer.owner), OFFERED, 0)
    saved, _ = await server.catalog.checkpoints(asked, ["sampler_weights"], time.time())
    titles = await find_titles(server, viewer)
    with_steps = [*dict.fromkeys(weights.run_id for weights in saved), *([run] if run in titles else [])]
    runs = {run_id: titles.get(run_id) or short(run_id) for run_id in with_steps}
    bases = list(server.models.served)
    values = {"bases": bases, "saved": saved, "chosen": chosen, "likely": LIKELY, "runs": runs, "run": run}
    return page(request, "playground.html", values | {"offered": {*bases, *(weights.tinker_path for weights in saved)}})


@router.get("/steps.json")
async def list_steps(server: Server, viewer: Viewing, run: Chosen) -> JSONResponse:
    """Return the saved steps of a run, the newest STEPS_SHOWN, oldest first, with the steps taken before each."""
    await server.runs.require(run, viewer.owner)
    newest = Page(Scope(viewer.owner), STEPS_SHOWN, 0)
    saved, _ = await server.catalog.checkpoints(newest, ["sampler_weights"], time.time(), run)
    steps = []
    for weights in reversed(saved):
        last = None if weights.saved_as is None else await server.steps.last_before(run, weights.saved_as)
        step = "" if last is None else f" · step {last.step + is_optim_step(last)}"
        steps.append({"path": weights.tinker_path, "title": f"{weights.name}{step}"})
    return JSONResponse(steps)
