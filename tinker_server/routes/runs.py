"""Routes that list training runs: every model that was created, in memory or not."""

import time

from fastapi import APIRouter

from api_schemas.listing import Cursor, from_unix
from api_schemas.runs import TrainingRunInfo, TrainingRunsResponse
from tinker_server.errors import UnknownModel
from tinker_server.routes.checkpoints import checkpoint_info
from tinker_server.store.catalog import RunRecord
from tinker_server.web.deps import CatalogDep
from tinker_server.web.parameters import AskedScope, RunIdInPath, ShortPage
from tinker_server.web.refusals import refused

router = APIRouter()


@router.get("/training_runs", response_model_exclude_none=True)
async def list_training_runs(catalog: CatalogDep, page: ShortPage) -> TrainingRunsResponse:
    """List training runs, newest first."""
    records, total = await catalog.runs(page, time.time())
    return TrainingRunsResponse(
        training_runs=[_training_run_info(record) for record in records],
        cursor=Cursor(offset=page.offset, limit=page.limit, total_count=total),
    )


@router.get("/training_runs/{run_id}", response_model_exclude_none=True, responses=refused(UnknownModel))
async def get_training_run(run_id: RunIdInPath, catalog: CatalogDep, scope: AskedScope) -> TrainingRunInfo:
    """Return one training run."""
    return _training_run_info(await catalog.run(run_id, scope, time.time()))


def _training_run_info(record: RunRecord) -> TrainingRunInfo:
    last, last_sampler = record.last_checkpoint, record.last_sampler_checkpoint
    return TrainingRunInfo(
        training_run_id=record.run.model_id,
        base_model=record.run.base_model,
        model_owner=record.run.owner,
        is_lora=not record.run.trainable.full,
        lora_rank=record.run.trainable.lora_rank,
        last_request_time=from_unix(record.last_request_at),
        last_checkpoint=None if last is None else checkpoint_info(last),
        last_sampler_checkpoint=None if last_sampler is None else checkpoint_info(last_sampler),
        user_metadata=record.run.user_metadata,
    )
