"""Training runs, the public records of models (docs/protocol.md, Saved weights)."""

from pydantic import AwareDatetime

from api_schemas.base import Response
from api_schemas.checkpoints import CheckpointInfo
from api_schemas.fields import BaseModelName, ModelId
from api_schemas.listing import Cursor, Metadata


class TrainingRunInfo(Response):
    """A model that was created, whether or not it is still in memory."""

    training_run_id: ModelId
    base_model: BaseModelName
    model_owner: str
    """The owner."""
    is_lora: bool = True
    """Whether the model is a LoRA adapter, not a whole model in training."""
    lora_rank: int | None
    """Rank of the adapter; null for a whole model."""
    corrupted: bool = False
    """Always false: a model whose process ended is created again from a checkpoint."""
    last_request_time: AwareDatetime
    """Time at which the last operation was accepted."""
    last_checkpoint: CheckpointInfo | None = None
    """The newest training checkpoint."""
    last_sampler_checkpoint: CheckpointInfo | None = None
    """The newest sampler weights."""
    user_metadata: Metadata = None


class TrainingRunsResponse(Response):
    """One page of training runs."""

    training_runs: list[TrainingRunInfo]
    """The page, newest first."""
    cursor: Cursor
    """Position of the page in the list."""
