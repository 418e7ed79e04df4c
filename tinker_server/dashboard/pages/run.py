"""One run's page: its progress, its operations, and downloads of its recorded steps as CSV and JSON."""

import csv
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, fields

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.runs import Progress, at_work, state_of
from tinker_server.dashboard.rendering import page, short
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.store.catalog import Page, Scope
from tinker_server.store.records import Step
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
OTHERS, OPERATIONS = 200, 30
ROWS_AT_ONCE = 500
"""Rows of a download that are encoded at once, which takes a few milliseconds."""
COLUMNS = [field.name for field in fields(Step) if field.name != "model_id"]


@router.get("")
async def show_run(request: Request, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the whole page."""
    values = await _summary(server, run_id, viewer)
    others, _ = await server.catalog.runs(Page(Scope(viewer.owner), OTHERS, 0), time.time())
    rest = [other.run for other in others if other.run.model_id != run_id]
    return page(request, "run.html", {**values, **await _operations(server, run_id), "others": rest})


@router.get("/summary")
async def show_summary(request: Request, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the run's current progress."""
    return page(request, "run_summary.html", await _summary(server, run_id, viewer))


@router.get("/operations")
async def show_operations(request: Request, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the latest operations."""
    await server.runs.require(run_id, viewer.owner)
    return page(request, "run_operations.html", {"run_id": run_id, **await _operations(server, run_id)})


@router.get("/steps.json")
async def download_json(run_id: str, server: Server, viewer: Viewing) -> Response:
    """Download the recorded steps as JSON, one object per operation."""
    await server.runs.require(run_id, viewer.owner)
    return _download(_json_parts(server.steps.pages(run_id, ROWS_AT_ONCE)), run_id, "json", "application/json")


@router.get("/steps.csv")
async def download_csv(run_id: str, server: Server, viewer: Viewing) -> Response:
    """Download the recorded steps as CSV."""
    await server.runs.require(run_id, viewer.owner)
    return _download(_csv_parts(server.steps.pages(run_id, ROWS_AT_ONCE)), run_id, "csv", "text/csv; charset=utf-8")


async def _summary(server: Services, run_id: str, viewer: Viewer) -> dict[str, object]:
    record = await server.catalog.run(run_id, Scope(viewer.owner), time.time())
    last = (await server.steps.recent([run_id])).get(run_id, [])
    state = state_of(record, at_work(server.scheduler.in_flight()))
    return {"record": record, "run": record.run, "run_id": run_id, "state": state, "progress": Progress.of(last)}


async def _operations(server: Services, run_id: str) -> dict[str, object]:
    running = {
        operation.seq_id for operation, runs in server.scheduler.in_flight() if runs and operation.lane == run_id
    }
    return {"operations": await server.catalog.operations_of_run(run_id, OPERATIONS), "running": running}


def _download(parts: AsyncIterator[str], run_id: str, ending: str, media_type: str) -> Response:
    name = f"{short(run_id).replace(':', '-')}-steps.{ending}"
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(parts, media_type=media_type, headers=disposition)


async def _csv_parts(pages: AsyncIterator[list[Step]]) -> AsyncIterator[str]:
    yield ",".join(COLUMNS) + "\r\n"
    async for steps in pages:
        text = io.StringIO()
        csv.writer(text).writerows([getattr(step, name) for name in COLUMNS] for step in steps)
        yield text.getvalue()


async def _json_parts(pages: AsyncIterator[list[Step]]) -> AsyncIterator[str]:
    before = "["
    async for steps in pages:
        yield before + ",\n".join(json.dumps(asdict(step)) for step in steps)
        before = ",\n"
    yield "]" if before != "[" else "[]"
