"""One run's page: its name, its progress, its operations, and downloads of its numbers as CSV and JSON."""

import contextlib
import csv
import io
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, fields
from typing import Annotated

from fastapi import APIRouter, Form, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from pydantic import Field

from tinker_server.api_schemas.base import Request
from tinker_server.dashboard.hints import hints
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.compare import MOST_COMPARED
from tinker_server.dashboard.pages.runs import Progress, busy_runs, state_of
from tinker_server.dashboard.rendering import page, short
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import UnknownModel
from tinker_server.store.catalog import Page, Scope
from tinker_server.store.client_metrics import Metric
from tinker_server.store.records import Step
from tinker_server.store.runs import Labels
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
OTHERS, OPERATIONS = 200, 30
ROWS_AT_ONCE = 500
"""Rows of a download that are encoded at once, which takes a few milliseconds."""
MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
COLUMNS = [field.name for field in fields(Step) if field.name != "model_id"]
METRIC_COLUMNS = [field.name for field in fields(Metric)]


@router.get("")
async def show_run(request: HttpRequest, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the whole page."""
    values = await _summary(server, run_id, viewer)
    others, _ = await server.catalog.runs(Page(Scope(viewer.owner), OTHERS, 0), time.time())
    rest = [other for other in others if other.run.model_id != run_id]
    compared = set(request.query_params.getlist("with")[:MOST_COMPARED])
    for old in compared - {other.run.model_id for other in rest} - {run_id}:
        with contextlib.suppress(UnknownModel):
            rest.append(await server.catalog.run(old, Scope(viewer.owner), time.time()))
    has_band = "band" in request.query_params
    found = {"others": rest, "compared": compared, "most_compared": MOST_COMPARED, "has_band": has_band}
    return page(request, "run.html", {**values, **await _operations(server, run_id), **found})


@router.get("/summary")
async def show_summary(request: HttpRequest, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the run's current progress."""
    return page(request, "run_summary.html", await _summary(server, run_id, viewer))


@router.get("/operations")
async def show_operations(request: HttpRequest, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the latest operations."""
    await server.runs.require(run_id, viewer.owner)
    return page(request, "run_operations.html", {"run_id": run_id, **await _operations(server, run_id)})


class LabelsForm(Request):
    """A run's labels, as the page sends them."""

    name: Annotated[str, Field(max_length=200)] = ""
    notes: Annotated[str, Field(max_length=10_000)] = ""
    tags: Annotated[str, Field(max_length=1_000)] = ""

    def labels(self) -> Labels:
        """Return the labels; tags are separated by commas."""
        tags = dict.fromkeys(filter(None, (tag.strip() for tag in self.tags.split(","))))
        return Labels(self.name.strip(), self.notes.strip(), list(tags))


@router.post("/labels")
async def set_labels(
    request: HttpRequest, run_id: str, server: Server, viewer: Viewing, sent: Annotated[LabelsForm, Form()]
) -> Response:
    """Name and describe the run."""
    await server.runs.set_labels(run_id, viewer.owner, sent.labels())
    server.futures.changes.note(viewer.owner)
    return page(request, "run_head.html", await _summary(server, run_id, viewer))


@router.get("/metrics.csv")
async def download_metrics(run_id: str, server: Server, viewer: Viewing) -> Response:
    """Download the metrics that the client reported as CSV."""
    await server.runs.require(run_id, viewer.owner)
    parts = _csv_parts(server.client_metrics.pages(run_id, ROWS_AT_ONCE), METRIC_COLUMNS)
    return _download(parts, run_id, "metrics.csv")


@router.get("/steps.json")
async def download_json(run_id: str, server: Server, viewer: Viewing) -> Response:
    """Download the recorded steps as JSON, one object per operation."""
    await server.runs.require(run_id, viewer.owner)
    return _download(_json_parts(server.steps.pages(run_id, ROWS_AT_ONCE)), run_id, "steps.json")


@router.get("/steps.csv")
async def download_csv(run_id: str, server: Server, viewer: Viewing) -> Response:
    """Download the recorded steps as CSV."""
    await server.runs.require(run_id, viewer.owner)
    return _download(_csv_parts(server.steps.pages(run_id, ROWS_AT_ONCE), COLUMNS), run_id, "steps.csv")


async def _summary(server: Services, run_id: str, viewer: Viewer) -> dict[str, object]:
    record = await server.catalog.run(run_id, Scope(viewer.owner), time.time())
    last = (await server.steps.recent([run_id])).get(run_id, [])
    return {
        "record": record,
        "run": record.run,
        "run_id": run_id,
        "state": state_of(record, await busy_runs(server, viewer.owner)),
        "progress": Progress.of(last),
        "hints": hints(last),
    }


async def _operations(server: Services, run_id: str) -> dict[str, object]:
    running = {
        operation.seq_id for operation, runs in server.scheduler.in_flight() if runs and operation.lane == run_id
    }
    return {"operations": await server.catalog.operations_of_run(run_id, OPERATIONS), "running": running}


def _download(parts: AsyncIterator[str], run_id: str, file: str) -> Response:
    name = f"{short(run_id).replace(':', '-')}-{file}"
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(parts, media_type=MEDIA_TYPES[file.rpartition(".")[2]], headers=disposition)


async def _csv_parts(pages: AsyncIterator[Sequence[Step | Metric]], columns: Sequence[str]) -> AsyncIterator[str]:
    yield ",".join(columns) + "\r\n"
    async for records in pages:
        text = io.StringIO()
        csv.writer(text).writerows([getattr(record, name) for name in columns] for record in records)
        yield text.getvalue()


async def _json_parts(pages: AsyncIterator[list[Step]]) -> AsyncIterator[str]:
    before = "["
    async for steps in pages:
        yield before + ",\n".join(json.dumps(asdict(step)) for step in steps)
        before = ",\n"
    yield "]" if before != "[" else "[]"
