"""The machine's page: queues, processes, engines, disk, and traces to download."""

import json
import shutil
import time
from collections import Counter
from dataclasses import dataclass

import psutil
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.api_schemas.training import CreateModelRequest
from tinker_server.auth.links import VALID_S
from tinker_server.backends.protocol import BaseModel, EngineUse, ProcessState
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import UnknownSampler
from tinker_server.offload import LARGE, off_loop
from tinker_server.routes.metrics_collect import distinct
from tinker_server.store.catalog import Page, Scope
from tinker_server.store.futures.records import Operation
from tinker_server.store.machine_history import KEPT_S
from tinker_server.web.deps import Server, ServerUrl, Services

router = APIRouter(prefix="/machine", route_class=PageRoute, include_in_schema=False)
SHOWN, SESSIONS = 100, 20


@dataclass(frozen=True)
class Waiting:
    """An operation that waits or runs. Only the kind of another owner's operation is shown."""

    operation_kind: str
    lane: str | None
    seq_id: int | None
    since: float
    runs: bool


@dataclass(frozen=True)
class BaseState:
    """One base model's processes, and the operations queued for them."""

    name: str
    processes: list[tuple[ProcessState, int | None]]
    """Processes, each with the resident bytes of it and its children."""
    use: EngineUse | None
    queue: list[Waiting]
    num_queued: Counter[bool]
    """Number of operations that run (True) and that wait (False)."""


@router.get("")
async def show_machine(request: Request, server: Server, viewer: Viewing) -> Response:
    """Show the whole page."""
    sessions = await server.catalog.sessions(Page(Scope(viewer.owner), SESSIONS, 0))
    return page(request, "machine.html", {**await _now(server, viewer), "sessions": sessions})


@router.get("/now")
async def show_now(request: Request, server: Server, viewer: Viewing) -> Response:
    """Show the part that changes."""
    return page(request, "machine_now.html", await _now(server, viewer))


@router.get("/history.json")
async def show_history(server: Server, viewer: Viewing) -> Response:
    """Return the machine's load over the last day, a line for each measure and its base model or GPU."""
    found = await server.machine_history.since(time.time() - KEPT_S)
    lines = [
        {"measure": measure, "of": of, "at": line.at, "value": line.value} for (measure, of), line in found.items()
    ]
    body = await off_loop(viewer.owner, LARGE, json.dumps, {"lines": lines})
    return Response(body, media_type="application/json")


@router.get("/traces/{session_id}")
async def download_trace(session_id: str, server: Server, viewer: Viewing, url: ServerUrl) -> Response:
    """Redirect to a link to a session's trace, valid for an hour. Raises UnknownSession."""
    await server.sessions.require(session_id, viewer.owner)
    return RedirectResponse(f"{url}/{server.links.sign(f'traces/{session_id}', int(time.time()) + VALID_S)}", 302)


async def _now(server: Services, viewer: Viewer) -> dict[str, object]:
    queues = await _queues(server, viewer)
    states = [await _state(name, base, queues, viewer) for name, base in distinct(dict(server.models.served)).items()]
    disk = await off_loop(viewer.owner, LARGE, shutil.disk_usage, server.settings.data_dir)
    gpus = await off_loop(viewer.owner, LARGE, server.backend.gpus)
    saved = await server.catalog.storage(viewer.owner, None, time.time())
    log_bytes = server.scheduler.log_bytes
    own_bytes = await off_loop(viewer.owner, LARGE, _memory, None)
    own_process = (ProcessState("server", psutil.Process().pid, True, 0), own_bytes)
    return {
        "bases": states,
        "disk": disk,
        "gpus": gpus,
        "saved_bytes": sum(one.size_bytes for one in saved),
        "num_saved": sum(one.checkpoints_count for one in saved),
        "log_bytes": log_bytes,
        "snapshots": server.snapshots,
        "server_process": own_process,
    }


async def _queues(server: Services, viewer: Viewer) -> dict[str, list[Waiting]]:
    """Return the operations by base model: running ones first, then by age."""
    found: dict[str, list[Waiting]] = {}
    for operation, runs in sorted(list(server.scheduler.in_flight()), key=lambda one: (not one[1], one[0].accepted_at)):
        base_model = await _base_model(server, operation)
        mine = operation.owner == viewer.owner
        lane, seq_id = (operation.lane, operation.seq_id) if mine else (None, None)
        found.setdefault(base_model, []).append(
            Waiting(operation.operation_kind, lane, seq_id, operation.accepted_at, runs)
        )
    return found


async def _base_model(server: Services, operation: Operation) -> str:
    """Return an operation's base model; empty if it cannot be known without reading the request."""
    match operation.request:
        case CreateModelRequest(base_model=str(name)) | SampleRequest(base_model=str(name)):
            return name
    if operation.operation_kind == "sample":
        try:
            return (await server.samplers.get(operation.lane)).base_model
        except UnknownSampler:
            return ""
    run = await server.runs.find(operation.lane)
    return "" if run is None else run.base_model


async def _state(name: str, base: BaseModel, queues: dict[str, list[Waiting]], viewer: Viewer) -> BaseState:
    queue = queues.get(name, [])
    memory = await off_loop(
        viewer.owner, LARGE, lambda: [(process, _memory(process.pid)) for process in base.processes()]
    )
    return BaseState(name, memory, await base.engine_use(), queue[:SHOWN], Counter(one.runs for one in queue))


def _memory(pid: int | None) -> int | None:
    """Return the resident bytes of a process and its children, or of this process alone for None."""
    try:
        process = psutil.Process(pid)
        family = [process] if pid is None else [process, *process.children(recursive=True)]
        return sum(int(one.memory_info().rss) for one in family)
    except psutil.Error:
        return None
