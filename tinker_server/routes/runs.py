"""Routes of training runs, which are all models that were created, in memory or not."""

import time

from fastapi import APIRouter, Response

from tinker_server.api_schemas.ids import owner_urn
from tinker_server.api_schemas.listing import Cursor, from_unix
from tinker_server.api_schemas.runs import LogMetricsRequest, TrainingRunInfo, TrainingRunsResponse
from tinker_server.errors import Busy, LimitReached, UnknownModel
from tinker_server.routes.checkpoints import checkpoint_info
from tinker_server.store.catalog import RunRecord
from tinker_server.store.client_metrics import VALUE_BYTES
from tinker_server.web.deps import Caller, CatalogDep, Server
from tinker_server.web.parameters import AskedScope, RunIdInPath, ShortPage
from tinker_server.web.refusals import describe

router = APIRouter()


@router.get("/training_runs", response_model_exclude_none=True)
async def list_training_runs(catalog: CatalogDep, page: ShortPage) -> TrainingRunsResponse:
    """List training runs, newest first."""
    records, total = await catalog.runs(page, time.time())
    return TrainingRunsResponse(
        training_runs=[_training_run_info(record) for record in records],
        cursor=Cursor(offset=page.offset, limit=page.limit, total_count=total),
    )


@router.get("/training_runs/{run_id}", response_model_exclude_none=True, responses=describe(UnknownModel))
async def get_training_run(run_id: RunIdInPath, catalog: CatalogDep, scope: AskedScope) -> TrainingRunInfo:
    """Return a training run."""
    return _training_run_info(await catalog.run(run_id, scope, time.time()))


@router.post("/training_runs/{run_id}/metrics", status_code=204, responses=describe(UnknownModel, LimitReached, Busy))
async def log_metrics(run_id: RunIdInPath, request: LogMetricsRequest, server: Server, caller: Caller) -> Response:
    """Record metrics that the client computed, such as a reward, for the run's page."""
    await server.runs.require(run_id, caller)
    num_bytes = len(request.metrics) * VALUE_BYTES
    await server.disk.require_room(caller, num_bytes)
    await server.client_metrics.put(run_id, request.step, request.metrics, time.time())
    server.disk.add(caller, num_bytes)
    server.futures.changes.note(caller)
    return Response(status_code=204)


def _training_run_info(record: RunRecord) -> TrainingRunInfo:
    last, last_sampler = record.last_checkpoint, record.last_sampler_checkpoint
    return TrainingRunInfo(
        training_run_id=record.run.model_id,
        base_model=record.run.base_model,
        model_owner=owner_urn(record.run.owner),
        is_lora=not record.run.trainable.full,
        lora_rank=record.run.trainable.lora_rank,
        last_request_time=from_unix(record.last_request_at),
        last_checkpoint=None if last is None else checkpoint_info(last),
        last_sampler_checkpoint=None if last_sampler is None else checkpoint_info(last_sampler),
        user_metadata=record.run.user_metadata,
    )
