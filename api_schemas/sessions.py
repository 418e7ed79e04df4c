"""Sessions: starting, keeping alive, finishing, listing and searching them (docs/protocol.md, Sessions)."""

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from api_schemas.base import NOTED, FirstError, Request, Response, at_most
from api_schemas.fields import Integer, ModelId, ProjectId, SamplingSessionId, SessionId
from api_schemas.listing import Metadata


class CreateSessionRequest(Request):
    """Start a session."""

    type: Literal["create_session"] = "create_session"
    tags: Annotated[list[str], FirstError(), NOTED] = []
    """Words the client noted."""
    user_metadata: Annotated[dict[str, Any], NOTED] = {}
    """Whatever the client wants to note, 16 KiB at most. It is listed and can be searched, and means nothing here."""
    sdk_version: Annotated[str, NOTED] = ""
    """Version of the client."""
    project_id: Annotated[str | None, NOTED] = None
    """A project, which is a mere name here; sessions without one are in `default`."""
    display_name: Annotated[str | None, NOTED] = None
    """A name that people read."""


class CreateSessionResponse(Response):
    """The new session, or that of the first request with the same idempotency key."""

    type: Literal["create_session"] = "create_session"
    session_id: SessionId


class SessionHeartbeatRequest(Request):
    """The client lives."""

    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: SessionId


class SessionHeartbeatResponse(Response):
    """The session goes on."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Request):
    """How a session ended."""

    type: Literal["success", "errored", "interrupted"]
    """Whether the client reached its end, met an error, or was stopped."""


class FinishSessionRequest(Request):
    """End a session."""

    reason: FinishReason
    """How it ended."""
    detail: str | None = None
    """More about it, as a text."""


class ListSessionsResponse(Response):
    """One page of sessions."""

    sessions: list[SessionId]
    """Ids, newest first."""


class GetSessionResponse(Response):
    """What a session made."""

    training_run_ids: list[ModelId]
    """The session's models, oldest first."""
    sampler_ids: list[SamplingSessionId]
    """The session's sampling sessions, oldest first."""
    user_metadata: Metadata = None
    display_name: str | None = None
    """A name that people read."""


class AssignProjectRequest(Request):
    """Move a session to a project."""

    project_id: Annotated[ProjectId, NOTED] = Field(min_length=1)


class SearchOwner(Request):
    """Whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    """One's own (there is no sharing of sessions, so `accessible` means the same), or those of named owners."""
    owner_urns: list[str] | None = Field(default=None, min_length=1, max_length=10)
    """With `user`: the owners."""


class StatusQuery(Request):
    """A state that a session may be in."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    """Sessions here are `active` or `client_finished`."""
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(default=None, min_length=1)
    """With `client_finished`: any of these."""


class SearchCursor(Request):
    """Where the next page starts: behind the last session of this one."""

    last_created_at: AwareDatetime
    """When the last session of the page was created."""
    last_session_id: str
    """The last session of the page."""


class SearchSessionsRequest(Request):
    """All conditions must hold; of `session_id` and `display_name`, either."""

    session_id: str | None = None
    """A session, which is one client."""
    display_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Its words must all be in the session's, in whatever case."""
    project_ids: Annotated[list[str], FirstError()] | None = Field(default=None, max_length=100)
    """In any of these projects."""
    user_metadata: Annotated[dict[str, str], at_most(50)] = {}
    """Entries that the session must have."""
    owner: SearchOwner = SearchOwner()
    """Whose sessions."""
    statuses: list[StatusQuery] | None = Field(default=None, min_length=1, max_length=20)
    """In any of these states."""
    limit: Integer = Field(default=50, ge=1, le=200)
    """Most entries to answer."""
    cursor: SearchCursor | None = None
    """`next_cursor` of the page before; absent: the first page."""


class SessionStatus(Response):
    """How a session stands."""

    type: Literal["active", "client_finished"]
    """Whether heartbeats come, or the client ended it."""
    reason: FinishReason | None = None
    """How it ended."""
    detail: str | None = None
    """More about it, as a text."""


class SessionSummary(Response):
    """A session as a search finds it."""

    session_id: SessionId
    created_at: AwareDatetime
    """When it was created."""
    owner: str
    """Whose it is."""
    project_id: ProjectId
    status: SessionStatus | None = None
    """None: neither finished nor known to be running."""
    checkpoints_count: int
    """Weights saved in the session."""
    checkpoint_storage_bytes: int
    """Their size together."""
    display_name: str | None = None
    """A name that people read."""
    user_metadata: Metadata = None


class SearchSessionsResponse(Response):
    """One page of a search."""

    sessions: list[SessionSummary]
    """Sessions, newest first."""
    next_cursor: SearchCursor | None = None
    """Where the next page begins; null: this is the last."""
