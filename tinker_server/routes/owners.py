"""Routes for administrators: all owners with what they have and use, their runs and keys; unloading and stopping runs.

Prompts, samples, checkpoints and curves stay with their owners: of them an administrator sees only how much there is.
"""

import asyncio
import time
from collections import Counter
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from tinker_server.api_schemas.listing import Cursor, from_unix
from tinker_server.api_schemas.owners import (
    KeysResponse,
    OwnedRun,
    OwnedRunsResponse,
    OwnersResponse,
    OwnerSummary,
    StopRunRequest,
    StopRunResponse,
    Tokens,
    UnloadRunRequest,
)
from tinker_server.api_schemas.sessions import FinishReason, FinishSessionRequest
from tinker_server.auth.described import describe_keys
from tinker_server.errors import AdministratorsOnly, Cancelled, UnknownModel
from tinker_server.operations.recording import is_optim_step
from tinker_server.store.catalog import title_of
from tinker_server.store.records import TrainingRun
from tinker_server.store.usage import HOUR_S
from tinker_server.web.deps import Administrator, Server, Services
from tinker_server.web.parameters import MAX_LIMIT
from tinker_server.web.refusals import describe

router = APIRouter(prefix="/admin")
PLACES: dict[str, Literal["memory", "disk", "ended"]] = {"active": "memory", "suspended": "disk", "lost": "ended"}
OF_ADMIN = describe(AdministratorsOnly)
OF_RUN = describe(AdministratorsOnly, UnknownModel)


@router.get("/owners", responses=OF_ADMIN)
async def list_owners(
    server: Server,
    _: Administrator,
    hours: Annotated[int, Query(ge=1, le=24 * 366, description="Hours for which tokens are counted.")] = 24,
) -> OwnersResponse:
    """List all owners with their runs, memory, disk, queue and tokens."""
    since = (time.time() // HOUR_S - hours + 1) * HOUR_S
    used, runs = await server.usage.by_owner(since), await server.runs.counts()
    keys = Counter(key.name for key in server.keys.all())
    working = Counter((operation.owner, is_running) for operation, is_running in server.scheduler.in_flight())
    memory_bytes = Counter[str]()
    for run, size_bytes in server.scheduler.in_memory():
        memory_bytes[run.owner] += size_bytes
    names = sorted({*keys, *(owner for owner, _ in used), *(owner for owner, _ in runs)})
    parts = await asyncio.gather(*(server.holdings.part(name) for name in names))
    owners = [
        OwnerSummary(
            owner=name,
            keys=keys[name],
            runs_in_memory=runs[name, "active"],
            runs_on_disk=runs[name, "suspended"],
            memory_bytes=memory_bytes[name],
            disk_bytes=part.held_bytes,
            operations_running=working[name, True],
            operations_waiting=working[name, False],
            tokens=Tokens(
                training=used[name, "training"], prefill=used[name, "prefill"], sampled=used[name, "sampled"]
            ),
        )
        for name, part in zip(names, parts, strict=True)
    ]
    return OwnersResponse(owners=owners, used_since=from_unix(since))


@router.get("/runs", responses=OF_ADMIN)
async def list_runs(
    server: Server,
    _: Administrator,
    owner: Annotated[str | None, Query(description="Only the runs of this owner.")] = None,
    limit: Annotated[int, Query(ge=0, description="Most entries to answer.")] = 50,
    offset: Annotated[int, Query(ge=0, lt=2**62, description="How many entries to skip.")] = 0,
) -> OwnedRunsResponse:
    """List the runs of all owners, newest first."""
    limit = min(limit, MAX_LIMIT)
    runs, total = await server.runs.page(owner, limit, offset)
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return OwnedRunsResponse(runs=await _make_runs(server, runs), cursor=cursor)


@router.post("/unload", status_code=204, responses=OF_RUN)
async def unload(request: UnloadRunRequest, server: Server, administrator: Administrator) -> Response:
    """Move a run's model from memory to disk, after the operation that runs. Its next operation brings it back."""
    run = await server.runs.get(request.run_id)
    if run.status == "active":
        await server.scheduler.suspend(run.model_id)
    await server.audit.note("run_unloaded", run.owner, model_id=run.model_id, by=administrator)
    return Response(status_code=204)


@router.post("/stop", responses=OF_RUN)
async def stop(request: StopRunRequest, server: Server, administrator: Administrator) -> StopRunResponse:
    """Finish the session of a run, so that it takes no new work, cancel all of it that waits, and drop its models.

    The operation that runs ends first. Checkpoints stay; what was not saved is lost.
    """
    run = await server.runs.get(request.run_id)
    why = f"stopped by the administrator {administrator}" + (f": {request.reason}" if request.reason else "")
    finished = FinishSessionRequest(reason=FinishReason(type="interrupted"), detail=why)
    await server.sessions.finish(run.session_id, finished, run.owner)
    run_ids, sampler_ids = await server.catalog.of_session(run.session_id)
    cancelled = server.scheduler.cancel_waiting({*run_ids, *sampler_ids}, Cancelled(f"the session was {why}"))
    stopped = [run_id for run_id in run_ids if (await server.runs.get(run_id)).status != "lost"]
    for run_id in stopped:
        await server.scheduler.drop(run_id)
        server.scheduler.forget(run_id)
    await server.audit.note("run_stopped", run.owner, model_id=run.model_id, by=administrator, reason=request.reason)
    return StopRunResponse(run_ids=stopped, cancelled=cancelled)


@router.get("/keys", responses=OF_ADMIN)
async def list_keys(server: Server, _: Administrator) -> KeysResponse:
    """List all keys with their scopes and times. Only the command line and the administrators' page change them."""
    return describe_keys(server.keys.all(), server.keys.used_at)


async def _make_runs(server: Services, runs: list[TrainingRun]) -> list[OwnedRun]:
    working = Counter((operation.lane, is_running) for operation, is_running in server.scheduler.in_flight())
    memory_bytes = {run.model_id: size_bytes for run, size_bytes in server.scheduler.in_memory()}
    recent = await server.steps.recent([run.model_id for run in runs], 1)
    last = {run_id: steps[-1] for run_id, steps in recent.items()}
    return [
        OwnedRun(
            run_id=run.model_id,
            name=title_of(run, await server.sessions.get(run.session_id)),
            owner=run.owner,
            base_model=run.base_model,
            lora_rank=run.trainable.lora_rank,
            place=PLACES[run.status],
            memory_bytes=memory_bytes.get(run.model_id, 0),
            operations_running=working[run.model_id, True],
            operations_waiting=working[run.model_id, False],
            steps=last[run.model_id].step + is_optim_step(last[run.model_id]) if run.model_id in last else 0,
            tokens=last[run.model_id].total_tokens if run.model_id in last else 0,
            created_at=from_unix(run.created_at),
            last_step_at=from_unix(last[run.model_id].at) if run.model_id in last else None,
        )
        for run in runs
    ]
