"""Types for listing, publishing, expiring, copying and downloading weights (docs/protocol.md, Saved weights)."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from tinker_server.api_schemas.base import NOTED, FirstError, Request, Response, at_most
from tinker_server.api_schemas.fields import AccessToken, BaseModelName, Integer, TinkerPathText, TtlSeconds
from tinker_server.api_schemas.listing import Cursor, Metadata
from tinker_server.api_schemas.sessions import SearchOwner
from tinker_server.api_schemas.training import LoraConfig, OptimizerConfig
from tinker_server.api_schemas.weights import Kind

CheckpointType = Literal["training", "sampler", "external"]
TYPES: dict[Kind, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class CheckpointInfo(Response):
    """Saved weights, as an entry of a list."""

    checkpoint_id: str
    """`weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`."""
    checkpoint_type: CheckpointType
    """Purpose of the weights."""
    time: AwareDatetime
    """Time of the save."""
    tinker_path: TinkerPathText
    base_model: BaseModelName
    size_bytes: int
    """Total size of the files."""
    public: bool
    """Whether every client may load them."""
    user_metadata: Metadata = None
    expires_at: AwareDatetime | None = None
    """Time at which they are deleted; null: never."""


class CheckpointsResponse(Response):
    """A page of saved weights."""

    checkpoints: list[CheckpointInfo]
    """The page, newest first."""
    cursor: Cursor
    """Position of the page in the list."""


class CheckpointCursor(Request):
    """Start of the next page: the last saved weights of this one."""

    last_created_at: AwareDatetime
    """Time at which the last weights of the page were saved."""
    last_checkpoint_uuid: str
    """Their tinker:// path; weights have no other id here."""


class SearchCheckpointsRequest(Request):
    """Search for saved weights. All conditions must hold."""

    project_ids: Annotated[list[str], FirstError()] | None = Field(default=None, max_length=100)
    """Projects that the weights' sessions may be in; null: any."""
    user_metadata: Annotated[dict[str, str], at_most(50)] = {}
    """Entries that the weights must have."""
    checkpoint_type: CheckpointType | None = None
    """Purpose of the weights; null: any."""
    owner: SearchOwner = SearchOwner()
    """Whose weights: `own`; `accessible`: also what others have published; `user`: of these, named owners'."""
    base_models: Annotated[list[str], FirstError()] | None = Field(default=None, max_length=100)
    """Base models that they may be of; null: any. An empty list matches nothing."""
    limit: Integer = Field(default=50, ge=1, le=200)
    """Largest number of weights to return."""
    cursor: CheckpointCursor | None = None
    """`next_cursor` of the page before; absent: the first page."""


class SearchCheckpointsResponse(Response):
    """A page of the weights found, newest first."""

    checkpoints: list[CheckpointInfo]
    """The page. It may have fewer than `limit` entries while there are more."""
    next_cursor: CheckpointCursor | None = None
    """Cursor of the next page; absent: this is the last one."""


class SetTtlRequest(Request):
    """Set or remove the expiry of weights."""

    ttl_seconds: TtlSeconds = None


class WeightsInfoRequest(Request):
    """Ask for the base model and shape of saved weights."""

    tinker_path: TinkerPathText


class WeightsInfoResponse(Response):
    """Base model and shape of saved weights, from which a model of the same shape can be created."""

    base_model: BaseModelName
    is_lora: bool = True
    """Whether they are of a LoRA adapter; false for a whole model that an older server trained."""
    lora_rank: int | None
    """Rank of the adapter; absent for a whole model."""
    train_unembed: bool
    """Whether the unembedding is trained."""
    train_mlp: bool
    """Whether the MLPs are trained."""
    train_attn: bool
    """Whether attention is trained."""
    optimizer_config: OptimizerConfig = OptimizerConfig()
    """The optimizer. Models here have adamw."""


class CopyWeightsRequest(Request):
    """Copy weights to a project, or to an unused id (session_id, model_seq_id)."""

    source_path: TinkerPathText
    destination_project_id: Annotated[str | None, NOTED] = Field(default=None, min_length=1)
    """Project the copy goes to."""
    session_id: str | None = None
    """Session the copy goes to; with `model_seq_id`."""
    model_seq_id: Integer | None = Field(default=None, ge=0, lt=2**63)
    """The client's number of the copy's training run in that session."""
    ttl_seconds: Integer | None = None
    """Seconds until the copy is deleted; absent: it is kept, even if the source expires."""
    weights_access_token: AccessToken = None


class CopyWeightsResponse(Response):
    """The path of the copy."""

    tinker_path: TinkerPathText


class ExternalWeightsUrlsResponse(Response):
    """URLs of exported weights."""

    urls: dict[str, str]
    """URL by the file's path within the weights; each can be fetched with a plain GET until `expires`."""
    expires: AwareDatetime
    """Time at which the URLs expire."""


class UploadStartRequest(Request):
    """Start the upload of an adapter that was exported before, here or elsewhere."""

    base_model: BaseModelName
    lora_config: LoraConfig
    """Shape of the adapter, which must be that of the files. Its seed is not used."""
    destination_project_id: Annotated[str | None, NOTED] = Field(default=None, min_length=1)
    """Project the weights go to."""


class UploadUrl(Response):
    """Link to which one file is put."""

    url: str
    """Signed URL; it takes a plain PUT with the file as its body."""
    headers: dict[str, str] = {}
    """Headers that the PUT must send: none here."""


class UploadStartResponse(Response):
    """Links to which the files are put."""

    upload_id: str
    """Id of the upload, with which it is finished."""
    urls: dict[str, UploadUrl | str]
    """Link by file name: `adapter_config.json` and `adapter_model.safetensors`. SDKs before 0.40 get the URL alone."""
    expires: AwareDatetime
    """Time at which the links expire."""


class UploadedFileResponse(Response):
    """A file has come."""

    size_bytes: int
    """Bytes of the file."""


class UploadFinishRequest(Request):
    """Turn the files of an upload into saved weights."""

    upload_id: str
    """Id of the upload."""


class UploadFinishResponse(Response):
    """The path of the uploaded weights."""

    tinker_path: TinkerPathText
