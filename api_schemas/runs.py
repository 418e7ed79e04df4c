"""Training runs, the public records of models (protocol section 4.5)."""

from typing import Literal

from pydantic import AwareDatetime

from api_schemas.base import Response
from api_schemas.checkpoints import CheckpointInfo, Cursor, Metadata


class TrainingRunInfo(Response):
    """A model that was created, whether or not it is still in memory."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: Literal[True] = True
    lora_rank: int
    corrupted: bool = False
    last_request_time: AwareDatetime
    last_checkpoint: CheckpointInfo | None = None
    last_sampler_checkpoint: CheckpointInfo | None = None
    user_metadata: Metadata | None = None


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRunInfo]
    cursor: Cursor
