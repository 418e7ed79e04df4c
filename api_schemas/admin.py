"""The record of what was done, what was used, and who asks (protocol section 4.5)."""

from typing import Any, Literal

from pydantic import AwareDatetime

from api_schemas.base import Response
from api_schemas.checkpoints import Metadata

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditEntryInfo(Response):
    timestamp: AwareDatetime
    event: str
    """`<resource>_<action>`, such as `checkpoint_deleted`."""
    event_details: dict[str, Any]
    model_id: str | None = None
    tinker_path: str | None = None


class AuditResponse(Response):
    """One day's entries, oldest first."""

    entries: list[AuditEntryInfo]


class TokenUsage(Response):
    """Tokens that a forward pass or a sampler went through."""

    type: Literal["training", "sampling_sample"]
    token_count: int


class PrefillUsage(Response):
    """Prompt tokens; `cached`: found in the prefix cache, not computed."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class CheckpointUsage(Response):
    """Weights that were saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class UsageEvent(Response):
    """One hour of one session's work on one base model. There are no prices here."""

    bucket_start: AwareDatetime
    bucket_end: AwareDatetime
    base_model: str
    user_id: str
    session_id: str
    project_id: str
    event_info: TokenUsage | PrefillUsage | CheckpointUsage


class UsageSession(Response):
    user_metadata: Metadata | None = None


class UsageResponse(Response):
    data: list[UsageEvent]
    sessions: dict[str, UsageSession]


class StorageUsage(Response):
    project_id: str
    org_user_urn: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class StorageUsageResponse(Response):
    data: list[StorageUsage]


class TraceExportResponse(Response):
    """Always ready: the trace is made when its URL is fetched."""

    status: Literal["ready"] = "ready"
    url: str


class Organization(Response):
    name: str


class User(Response):
    email: str


class ApiKeyDetails(Response):
    org_details: Organization
    user_details: User


class ApiKeyResponse(Response):
    key_id: int
    name: str
    note: str
    details: ApiKeyDetails
