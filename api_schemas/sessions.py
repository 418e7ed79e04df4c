"""Types for starting, keeping alive, finishing, listing and searching sessions (docs/protocol.md, Sessions)."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from tinker_server.api_schemas.base import NOTED, FirstError, Request, Response, at_most
from tinker_server.api_schemas.fields import (
    Integer,
    ModelId,
    NamedOwner,
    OwnerUrn,
    ProjectId,
    SamplingSessionId,
    SessionId,
)
from tinker_server.api_schemas.listing import Metadata


class CreateSessionRequest(Request):
    """Start a session."""

    type: Literal["create_session"] = "create_session"
    tags: Annotated[list[str], FirstError(), NOTED] = []
    """Free-form tags of the client."""
    user_metadata: Annotated[dict[str, object], NOTED] = {}
    """Free-form metadata of the client, 16 KiB at most. It is listed and searchable, and has no effect."""
    sdk_version: Annotated[str, NOTED] = ""
    """Version of the client."""
    project_id: Annotated[str | None, NOTED] = None
    """A project, which is only a name here; sessions without one are in `default`."""
    display_name: Annotated[str | None, NOTED] = None
    """A name for people."""


class CreateSessionResponse(Response):
    """The new session, or that of the first request with the same idempotency key."""

    type: Literal["create_session"] = "create_session"
    session_id: SessionId


class SessionHeartbeatRequest(Request):
    """Report that the client is alive."""

    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: SessionId


class SessionHeartbeatResponse(Response):
    """The session is alive."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Request):
    """Outcome of a session."""

    type: Literal["success", "errored", "interrupted"]
    """Whether the client completed, failed, or was interrupted."""


class FinishSessionRequest(Request):
    """Finish a session."""

    reason: FinishReason
    """Outcome of the session."""
    detail: Annotated[str | None, NOTED] = None
    """Details of the outcome, as a text."""


class ListSessionsResponse(Response):
    """A page of sessions."""

    sessions: list[SessionId]
    """Ids, newest first."""


class GetSessionResponse(Response):
    """A session's models and sampling sessions."""

    training_run_ids: list[ModelId]
    """The session's models, oldest first."""
    sampler_ids: list[SamplingSessionId]
    """The session's sampling sessions, oldest first."""
    user_metadata: Metadata = None
    display_name: str | None = None
    """A name for people."""


class AssignProjectRequest(Request):
    """Move a session to a project."""

    project_id: Annotated[ProjectId, NOTED] = Field(min_length=1)


class SearchOwner(Request):
    """Owners whose sessions are searched."""

    type: Literal["own", "accessible", "user"] = "own"
    """`own`: the caller's sessions; `accessible`: the same, since sessions are not shared; `user`: named owners'."""
    owner_urns: list[NamedOwner] | None = Field(default=None, min_length=1, max_length=10)
    """With `user`: the owners."""


class StatusQuery(Request):
    """A state of sessions to search for."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    """Sessions here are `active` or `client_finished`."""
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(default=None, min_length=1)
    """With `client_finished`: any of these outcomes."""


class SearchCursor(Request):
    """Start of the next page: the last session of this one."""

    last_created_at: AwareDatetime
    """Time at which the last session of the page was created."""
    last_session_id: str
    """The last session of the page."""


class SearchSessionsRequest(Request):
    """Search for sessions. All conditions must hold, but of `session_id` and `display_name` one is enough."""

    session_id: str | None = None
    """A session, which is one client."""
    display_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Words that the session's name must contain, in any case."""
    project_ids: Annotated[list[str], FirstError()] | None = Field(default=None, max_length=100)
    """Projects that the session may be in."""
    user_metadata: Annotated[dict[str, str], at_most(50)] = {}
    """Entries that the session must have."""
    owner: SearchOwner = SearchOwner()
    """Whose sessions are searched: the caller's own, or those of named owners."""
    statuses: list[StatusQuery] | None = Field(default=None, min_length=1, max_length=20)
    """States that the session may be in."""
    limit: Integer = Field(default=50, ge=1, le=200)
    """Largest number of sessions to return."""
    cursor: SearchCursor | None = None
    """`next_cursor` of the page before; absent: the first page."""


class SessionStatus(Response):
    """State of a session."""

    type: Literal["active", "client_finished"]
    """`active`: heartbeats arrive; `client_finished`: the client finished it."""
    reason: FinishReason | None = None
    """Outcome of the session."""
    detail: str | None = None
    """Details of the outcome, as a text."""


class SessionSummary(Response):
    """A session as a result of a search."""

    session_id: SessionId
    created_at: AwareDatetime
    """Time of its creation."""
    owner: OwnerUrn
    project_id: ProjectId
    status: SessionStatus | None = None
    """Its state; null: neither finished nor known to be running."""
    checkpoints_count: int
    """Number of weights saved in the session."""
    checkpoint_storage_bytes: int
    """Total size of these weights."""
    display_name: str | None = None
    """A name for people."""
    user_metadata: Metadata = None


class SearchSessionsResponse(Response):
    """A page of a search."""

    sessions: list[SessionSummary]
    """Sessions, newest first."""
    next_cursor: SearchCursor | None = None
    """Start of the next page; null: this is the last."""
