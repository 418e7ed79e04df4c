"""The service itself: client configuration, sessions, telemetry, health (protocol section 2)."""

from typing import Any, Literal

from api_schemas.base import Request, Response


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
    sample_cancel_enabled: bool = False


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
