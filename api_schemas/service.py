"""Types for client configuration, capabilities, telemetry and health (docs/protocol.md, Start)."""

from typing import Annotated, Literal

from tinker_server.api_schemas.base import FirstError, Request, Response
from tinker_server.api_schemas.fields import SessionId


class ClientConfigRequest(Request):
    """A client's description of itself. All fields but its version are ignored."""

    model_config = {"extra": "ignore"}
    sdk_version: str
    """Version of the client."""


class ClientConfigResponse(Response):
    """Flags that steer the SDK; omitted ones have the SDK's default."""

    parallel_fwdbwd_chunks: bool = False
    """False: the chunks of a batch are sent in order, so that a missing sequence number is never still on its way."""
    proto_write_fwdbwd: bool = True
    """Whether forward_backward is sent as protobuf."""
    fwd_via_fwdbwd: bool = True
    """Whether forward passes are sent as forward_backward with forward_only."""
    create_model_via_load_weights: bool = True
    """Whether load_weights may create a model."""
    pjwt_auth_enabled: bool = True
    """Whether the SDK exchanges its key for a token, whose claims `whoami` reads."""


class DynamicConfigResponse(Response):
    """Flags that may change while a client runs."""

    refresh_interval_sec: int = 300
    """Seconds after which the client asks again."""
    sample_cancel_enabled: bool = True
    """Whether the SDK cancels samples that it stops waiting for."""


class TelemetryRequest(Request):
    """A client's own view of its session. The events are logged, not stored."""

    model_config = {"extra": "ignore"}
    session_id: SessionId
    sdk_version: str = ""
    """Version of the client."""
    platform: str = ""
    """Platform of the client."""
    events: Annotated[list[dict[str, object]], FirstError()] = []
    """Events of the client."""


class TelemetryResponse(Response):
    """The events were accepted."""

    status: Literal["accepted"] = "accepted"


class HealthResponse(Response):
    """The server accepts requests."""

    status: Literal["ok"] = "ok"


class SupportedModel(Response):
    """A served base model."""

    model_name: str
    """Its public name."""
    max_context_length: int
    """Longest sequence in tokens."""
    trainable: bool = True
    """Whether models can be trained on it."""
    sampleable: bool = True
    """Whether it can be sampled from."""


class ServerCapabilities(Response):
    """Capabilities of the server."""

    supported_models: list[SupportedModel]
    """The served base models."""
