"""Listing, publishing, expiring, copying and downloading saved weights (protocol section 4.5)."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BeforeValidator, Field

from api_schemas.base import Request, Response
from api_schemas.training import OptimizerConfig
from api_schemas.weights import Kind

CheckpointType = Literal["training", "sampler", "external"]
TYPES: dict[Kind, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def from_unix(at: float) -> datetime:
    """A time as it is answered, with its zone."""
    return datetime.fromtimestamp(at, UTC)


def as_texts(value: Any) -> Any:
    """What a client noted, as it is answered: the SDK reads texts only."""
    if not isinstance(value, dict):
        return value
    return {key: item if isinstance(item, str) else str(item) for key, item in value.items() if item is not None}


Metadata = Annotated[dict[str, str], BeforeValidator(as_texts)]
"""What a client noted; values that are no texts are answered as their text."""


class Cursor(Response):
    """Which part of a list this is."""

    offset: int
    limit: int
    total_count: int


class CheckpointInfo(Response):
    """Saved weights, as they are listed."""

    checkpoint_id: str
    """`weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`."""
    checkpoint_type: CheckpointType
    time: AwareDatetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: Metadata | None = None
    expires_at: AwareDatetime | None = None


class CheckpointsResponse(Response):
    checkpoints: list[CheckpointInfo]
    cursor: Cursor


class SetTtlRequest(Request):
    """Let weights expire so many seconds from now; null: never."""

    ttl_seconds: int | None = None


class WeightsInfoRequest(Request):
    tinker_path: str


class WeightsInfoResponse(Response):
    """What is needed to make a model of the weights' shape."""

    base_model: str
    is_lora: Literal[True] = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CopyWeightsRequest(Request):
    """Copy weights to a project, or to a free place (session_id, model_seq_id) of a session."""

    source_path: str
    destination_project_id: str | None = Field(default=None, min_length=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    ttl_seconds: int | None = None
    """Until the copy expires; that the source does makes no difference."""
    weights_access_token: str | None = None
    """An API key of the weights' owner, to read what is not published; also as header X-Tinker-Weights-Access-Token."""


class CopyWeightsResponse(Response):
    tinker_path: str


class ExternalWeightsUrlsResponse(Response):
    urls: dict[str, str]
    """By the file's path within the weights; each can be fetched by a plain GET until `expires`."""
    expires: AwareDatetime
