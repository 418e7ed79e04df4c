"""Training runs, the public records of models (docs/protocol.md, Saved weights)."""

from typing import Annotated

from pydantic import AwareDatetime, Field

from tinker_server.api_schemas.base import Request, Response, at_most
from tinker_server.api_schemas.checkpoints import CheckpointInfo
from tinker_server.api_schemas.fields import BaseModelName, Integer, ModelId, OwnerUrn, Real
from tinker_server.api_schemas.listing import Cursor, Metadata


class TrainingRunInfo(Response):
    """A model that was created, whether or not it is still in memory."""

    training_run_id: ModelId
    base_model: BaseModelName
    model_owner: OwnerUrn
    is_lora: bool = True
    """Whether the model is a LoRA adapter; false for a whole model that an older server trained."""
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


MetricName = Annotated[str, Field(min_length=1, max_length=200)]


class LogMetricsRequest(Request):
    """Report metrics that the client computed of a step of a run."""

    step: Annotated[Integer, Field(ge=0, lt=2**53)]
    """The client's count of steps. A metric that is reported again for a step replaces the earlier value."""
    metrics: Annotated[dict[MetricName, Real], at_most(512)]
    """Finite numbers by name, such as `reward`, `test/accuracy`."""


class TrainingRunsResponse(Response):
    """A page of training runs."""

    training_runs: list[TrainingRunInfo]
    """The page, newest first."""
    cursor: Cursor
    """Position of the page in the list."""
