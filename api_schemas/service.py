"""The service itself: configuration of clients, capabilities, telemetry, health (docs/protocol.md, Start)."""

from typing import Annotated, Any, Literal

from api_schemas.base import FirstError, Request, Response
from api_schemas.fields import SessionId


class ClientConfigRequest(Request):
    """What a client tells of itself. Only its version could be of use here."""

    model_config = {"extra": "ignore"}
    sdk_version: str
    """Version of the client."""


class ClientConfigResponse(Response):
    """Flags that steer the SDK; every one we leave out has the SDK's default."""

    parallel_fwdbwd_chunks: bool = False
    """False: the chunks of a batch are posted one after the other, so a missing number is never on its way."""
    proto_write_fwdbwd: bool = True
    """Whether forward_backward is sent as protobuf."""
    fwd_via_fwdbwd: bool = True
    """Whether forward passes are sent as forward_backward."""
    create_model_via_load_weights: bool = True
    """Whether load_weights may create a model."""


class DynamicConfigResponse(Response):
    """Flags that may change while a client lives."""

    refresh_interval_sec: int = 300
    """Seconds after which the client asks again."""
    sample_cancel_enabled: bool = True
    """Samples whose client stops waiting are cancelled."""


class TelemetryRequest(Request):
    """The client's own view of a session: its events are logged, never kept."""

    model_config = {"extra": "ignore"}
    session_id: SessionId
    sdk_version: str = ""
    """Version of the client."""
    platform: str = ""
    """Where the client runs."""
    events: Annotated[list[dict[str, Any]], FirstError()] = []
    """What the client reports."""


class TelemetryResponse(Response):
    """The events were taken."""

    status: Literal["accepted"] = "accepted"


class HealthResponse(Response):
    """The server takes requests."""

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
    """What this server serves."""

    supported_models: list[SupportedModel]
    """The served base models."""
