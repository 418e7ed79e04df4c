"""Comparison of runs: those that are ticked or in a group, drawn over the first, and how their settings differ."""

import json
import time
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.runs_view import Asked
from tinker_server.dashboard.rendering import base_of, page
from tinker_server.dashboard.viewer import Viewing
from tinker_server.errors import BadRequest
from tinker_server.store.catalog import Page, RunRecord, Scope
from tinker_server.store.run_search import Group, RunSearch
from tinker_server.web.deps import Server

router = APIRouter(route_class=PageRoute, include_in_schema=False)
MOST_COMPARED = 7
"""Runs that are drawn over another."""
With = Annotated[list[Annotated[str, Field(max_length=200)]] | None, Query(alias="with", max_length=MOST_COMPARED)]


@router.get("/compare")
async def compare(request: Request, server: Server, viewer: Viewing, view: Asked) -> Response:
    """Redirect to the page of the first run, with the others drawn over it; of a group, to its newest as a mean."""
    run_ids, band = list(view.run), {}
    if view.group and view.only:
        search = RunSearch([], {}, {}, view.archived, Group(view.group, view.member))
        found, _ = await server.catalog.runs(Page(Scope(viewer.owner), MOST_COMPARED + 1, 0), time.time(), search)
        run_ids, band = [record.run.model_id for record in found], {"band": "true"}
    if not run_ids:
        raise BadRequest("run: no run is chosen to be compared")
    query = urlencode([*(("with", run_id) for run_id in run_ids[1:]), *band.items()])
    return RedirectResponse(f"{base_of(request)}/runs/{quote(run_ids[0], safe=':')}{query and '?'}{query}", 303)


@router.get("/runs/{run_id}/settings")
async def show_settings(
    request: Request, run_id: str, server: Server, viewer: Viewing, others: With = None
) -> Response:
    """Show the settings in which the runs differ."""
    run_ids = list(dict.fromkeys([run_id, *(others or [])]))
    scope, now = Scope(viewer.owner), time.time()
    records = [await server.catalog.run(of, scope, now) for of in run_ids]
    recent = await server.steps.recent(run_ids)
    settings = [
        settings_of(record, [step.learning_rate for step in recent.get(record.run.model_id, [])]) for record in records
    ]
    names = list(dict.fromkeys(name for of in settings for name in of))
    rows = {name: [of.get(name, "–") for of in settings] for name in names}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    same = {name: values[0] for name, values in rows.items() if name not in differing}
    return page(request, "run_settings.html", {"records": records, "differing": differing, "same": same})


def settings_of(record: RunRecord, learning_rates: list[float | None]) -> Mapping[str, str]:
    """Return what a run was made with, by name, as texts; and its last learning rate."""
    run = record.run
    found: dict[str, object] = {"base model": run.base_model, **run.trainable.model_dump()}
    rates = [rate for rate in learning_rates if rate is not None]
    found |= {"learning rate (last)": rates[-1]} if rates else {}
    found |= {f"optimizer {name}": value for name, value in run.optimizer_config.items()}
    found |= {f"metadata {name}": value for name, value in record.metadata.items() if name != "name"}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}
