"""The service itself: client configuration, sessions, telemetry, health (protocol section 2)."""

from typing import Any, Literal

from pydantic import AwareDatetime, Field

from api_schemas.base import Request, Response
from api_schemas.checkpoints import Metadata


class ClientConfigRequest(Request):
    model_config = {"extra": "ignore"}  # the only thing we could use of it is the version
    sdk_version: str


class ClientConfigResponse(Response):
    """Flags that steer the SDK; every one we leave out has the SDK's default."""

    parallel_fwdbwd_chunks: bool = False
    """False: the chunks of a batch are posted one after the other, so a missing number is never on its way."""
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    create_model_via_load_weights: bool = True


class DynamicConfigResponse(Response):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    """Samples whose client stops waiting are cancelled."""


class CreateSessionRequest(Request):
    type: Literal["create_session"] = "create_session"
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class CreateSessionResponse(Response):
    type: Literal["create_session"] = "create_session"
    session_id: str


class SessionHeartbeatRequest(Request):
    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: str


class SessionHeartbeatResponse(Response):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Request):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Request):
    reason: FinishReason
    detail: str | None = None


class TelemetryRequest(Request):
    """The client's own view of a session: its events are logged, never kept."""

    model_config = {"extra": "ignore"}
    session_id: str
    sdk_version: str = ""
    platform: str = ""
    events: list[dict[str, Any]] = []


class TelemetryResponse(Response):
    status: Literal["accepted"] = "accepted"


class HealthResponse(Response):
    status: Literal["ok"] = "ok"


class SupportedModel(Response):
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class ServerCapabilities(Response):
    supported_models: list[SupportedModel]


class ListSessionsResponse(Response):
    sessions: list[str]


class GetSessionResponse(Response):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: Metadata | None = None
    display_name: str | None = None


class AssignProjectRequest(Request):
    project_id: str = Field(min_length=1)


class SearchOwner(Request):
    """Whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] | None = Field(default=None, min_length=1, max_length=10)
    """With `user`: the owners."""


class StatusQuery(Request):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(default=None, min_length=1)
    """With `client_finished`: any of these."""


class SearchCursor(Request):
    """Where the next page starts: behind the last session of this one."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchSessionsRequest(Request):
    """All conditions must hold; of `session_id` and `display_name`, either."""

    session_id: str | None = None
    display_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Its words must all be in the session's, in whatever case."""
    project_ids: list[str] | None = Field(default=None, max_length=100)
    user_metadata: dict[str, str] = Field(default={}, max_length=50)
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = Field(default=None, min_length=1, max_length=20)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


class SessionStatus(Response):
    type: Literal["active", "client_finished"]
    reason: FinishReason | None = None
    detail: str | None = None


class SessionSummary(Response):
    session_id: str
    created_at: AwareDatetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    """None: neither finished nor known to be running."""
    checkpoints_count: int
    checkpoint_storage_bytes: int
    display_name: str | None = None
    user_metadata: Metadata | None = None


class SearchSessionsResponse(Response):
    """Newest first."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None
