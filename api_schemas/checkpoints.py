"""Listing, publishing, expiring, copying and downloading saved weights (docs/protocol.md, Saved weights)."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from api_schemas.base import NOTED, Request, Response
from api_schemas.fields import AccessToken, BaseModelName, Integer, TinkerPathText, TtlSeconds
from api_schemas.listing import Cursor, Metadata
from api_schemas.training import OptimizerConfig
from api_schemas.weights import Kind

CheckpointType = Literal["training", "sampler", "external"]
TYPES: dict[Kind, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class CheckpointInfo(Response):
    """Saved weights, as they are listed."""

    checkpoint_id: str
    """`weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`."""
    checkpoint_type: CheckpointType
    """What the weights are for."""
    time: AwareDatetime
    """When they were saved."""
    tinker_path: TinkerPathText
    size_bytes: int
    """Size of the files together."""
    public: bool
    """Whether every client may load them."""
    user_metadata: Metadata = None
    expires_at: AwareDatetime | None = None
    """When they are deleted; null: never."""


class CheckpointsResponse(Response):
    """One page of saved weights."""

    checkpoints: list[CheckpointInfo]
    """The page, newest first."""
    cursor: Cursor
    """Which part of the list this is."""


class SetTtlRequest(Request):
    """Let weights expire."""

    ttl_seconds: TtlSeconds = None


class WeightsInfoRequest(Request):
    """Ask what saved weights are of."""

    tinker_path: TinkerPathText


class WeightsInfoResponse(Response):
    """What is needed to make a model of the weights' shape."""

    base_model: BaseModelName
    is_lora: bool = True
    """Whether they are a LoRA adapter's, and not a whole model's."""
    lora_rank: int | None
    """Rank of the adapter; absent where it is none."""
    train_unembed: bool
    """Whether the unembedding is trained."""
    train_mlp: bool
    """Whether the MLPs are trained."""
    train_attn: bool
    """Whether attention is trained."""
    optimizer_config: OptimizerConfig = OptimizerConfig()
    """The optimizer. Models here have adamw."""


class CopyWeightsRequest(Request):
    """Copy weights to a project, or to a free place (session_id, model_seq_id) of a session."""

    source_path: TinkerPathText
    destination_project_id: Annotated[str | None, NOTED] = Field(default=None, min_length=1)
    """Project the copy goes to."""
    session_id: str | None = None
    """Session the copy goes to; with `model_seq_id`."""
    model_seq_id: Integer | None = Field(default=None, ge=0, lt=2**63)
    """The client's number of the copy's training run in that session."""
    ttl_seconds: Integer | None = None
    """Seconds until the copy is deleted; absent: it is kept, also where the source expires."""
    weights_access_token: AccessToken = None


class CopyWeightsResponse(Response):
    """The copy."""

    tinker_path: TinkerPathText


class ExternalWeightsUrlsResponse(Response):
    """Where exported weights can be fetched."""

    urls: dict[str, str]
    """By the file's path within the weights; each can be fetched by a plain GET until `expires`."""
    expires: AwareDatetime
    """When the links end."""
