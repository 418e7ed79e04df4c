"""The audit log, usage, and the owner of a key (docs/protocol.md, Records)."""

from typing import Literal

from pydantic import AwareDatetime

from tinker_server.api_schemas.base import Request, Response
from tinker_server.api_schemas.fields import BaseModelName, OwnerUrn, ProjectId, SessionId
from tinker_server.api_schemas.listing import Metadata

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditEntryInfo(Response):
    """An audited action."""

    timestamp: AwareDatetime
    """Time of the action."""
    event: str
    """`<resource>_<action>`, such as `checkpoint_deleted`."""
    event_details: dict[str, object]
    """Details of the action, such as the ids of its objects."""
    model_id: str | None = None
    """The model that was acted on."""
    tinker_path: str | None = None
    """The saved weights that were acted on."""


class AuditResponse(Response):
    """The audited actions of one day."""

    entries: list[AuditEntryInfo]
    """Oldest first."""


class TokenUsage(Response):
    """Tokens that a trainer or a sampler processed."""

    type: Literal["training", "sampling_sample"]
    """`training`: tokens of forward passes; `sampling_sample`: sampled tokens."""
    token_count: int
    """Number of tokens."""


class PrefillUsage(Response):
    """Prompt tokens of samples."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    """Whether they were found in the prefix cache, and so not computed."""
    token_count: int
    """Number of tokens."""


class CheckpointUsage(Response):
    """Weights that were saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int
    """Number of saved weights."""


class UsageEvent(Response):
    """Usage of a base model by one session in one hour. This server has no prices."""

    bucket_start: AwareDatetime
    """Start of the hour."""
    bucket_end: AwareDatetime
    """End of the hour."""
    base_model: BaseModelName
    user_id: OwnerUrn
    session_id: SessionId
    project_id: ProjectId
    event_info: TokenUsage | PrefillUsage | CheckpointUsage
    """Kind and amount of the usage."""


class UsageSession(Response):
    """A session with usage."""

    user_metadata: Metadata = None


class UsageResponse(Response):
    """Usage within an interval."""

    data: list[UsageEvent]
    """An entry per hour, session, base model and kind."""
    sessions: dict[str, UsageSession]
    """The sessions of `data`, by id."""


class StorageUsage(Response):
    """Saved weights of one project."""

    project_id: ProjectId
    org_user_urn: OwnerUrn
    checkpoint_count: int
    """Number of saved weights."""
    size_bytes: int
    """Total size of their files."""
    size_gigabytes: float
    """The same in 10^9 bytes."""


class StorageUsageResponse(Response):
    """The saved weights that are stored now."""

    data: list[StorageUsage]
    """An entry per project."""


class TraceExportResponse(Response):
    """A trace's URL. It is always ready, since the trace is made when its URL is fetched."""

    status: Literal["ready"] = "ready"
    url: str
    """Signed URL of the trace."""


class Organization(Response):
    """The organization of a key. This server has none, so its name is the owner's."""

    name: str
    """Its name."""


class User(Response):
    """The user of a key."""

    email: str
    """The owner's name, since this server knows no addresses."""


class ApiKeyDetails(Response):
    """Organization and user of a key."""

    org_details: Organization
    """The organization."""
    user_details: User
    """The user."""


class AuthTokenRequest(Request):
    """The key is in the header; the body is empty."""


class AuthTokenResponse(Response):
    """A token for the key of the request."""

    jwt: str
    """The token, which may be sent in the key's place."""


class ApiKeyResponse(Response):
    """The key of the request."""

    key_id: int
    """Number of the key; always 0, since keys here have only names."""
    name: str
    """The owner that it belongs to."""
    note: str
    """A remark if every key is accepted, else empty."""
    details: ApiKeyDetails
    """Organization and user."""
