"""The record of what was done, what was used, and who asks (docs/protocol.md, Records)."""

from typing import Any, Literal

from pydantic import AwareDatetime

from api_schemas.base import Response
from api_schemas.fields import BaseModelName, ProjectId, SessionId
from api_schemas.listing import Metadata

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditEntryInfo(Response):
    """One thing that was done."""

    timestamp: AwareDatetime
    """When it was done."""
    event: str
    """`<resource>_<action>`, such as `checkpoint_deleted`."""
    event_details: dict[str, Any]
    """What it was done to."""
    model_id: str | None = None
    """The model it was done to."""
    tinker_path: str | None = None
    """The saved weights it was done to."""


class AuditResponse(Response):
    """What was done on one day."""

    entries: list[AuditEntryInfo]
    """Oldest first."""


class TokenUsage(Response):
    """Tokens that a forward pass or a sampler went through."""

    type: Literal["training", "sampling_sample"]
    """What went through them: a forward pass, or a sampler."""
    token_count: int
    """Tokens."""


class PrefillUsage(Response):
    """Prompt tokens."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    """Whether they were found in the prefix cache, and so not computed."""
    token_count: int
    """Tokens."""


class CheckpointUsage(Response):
    """Weights that were saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int
    """How many."""


class UsageEvent(Response):
    """One hour of one session's work on one base model. There are no prices here."""

    bucket_start: AwareDatetime
    """Start of the hour."""
    bucket_end: AwareDatetime
    """End of the hour."""
    base_model: BaseModelName
    user_id: str
    """Who used it."""
    session_id: SessionId
    project_id: ProjectId
    event_info: TokenUsage | PrefillUsage | CheckpointUsage
    """What was used."""


class UsageSession(Response):
    """A session that used something."""

    user_metadata: Metadata = None


class UsageResponse(Response):
    """What was used within the time asked for."""

    data: list[UsageEvent]
    """By hour, session, base model and kind."""
    sessions: dict[str, UsageSession]
    """The sessions of `data`, by id."""


class StorageUsage(Response):
    """Saved weights of one project."""

    project_id: ProjectId
    org_user_urn: str
    """Who they belong to."""
    checkpoint_count: int
    """How many there are."""
    size_bytes: int
    """Size of their files together."""
    size_gigabytes: float
    """The same in 10^9 bytes."""


class StorageUsageResponse(Response):
    """What is stored now."""

    data: list[StorageUsage]
    """By project."""


class TraceExportResponse(Response):
    """Always ready: the trace is made when its URL is fetched."""

    status: Literal["ready"] = "ready"
    url: str
    """Where it can be fetched."""


class Organization(Response):
    """The organization of a key: there are none here, so it is called like the owner."""

    name: str
    """Its name."""


class User(Response):
    """The user of a key."""

    email: str
    """The owner's name: addresses are not known here."""


class ApiKeyDetails(Response):
    """Who is behind a key."""

    org_details: Organization
    """The organization."""
    user_details: User
    """The user."""


class ApiKeyResponse(Response):
    """The key of the request."""

    key_id: int
    """Number of the key: 0, since keys here have names alone."""
    name: str
    """The owner it speaks for."""
    note: str
    """What the key may do."""
    details: ApiKeyDetails
    """Who is behind it."""
