"""Routes for client configuration, capabilities and telemetry."""

import json
import logging

from fastapi import APIRouter

from tinker_server.api_schemas.service import (
    ClientConfigRequest,
    ClientConfigResponse,
    DynamicConfigResponse,
    ServerCapabilities,
    SupportedModel,
    TelemetryRequest,
    TelemetryResponse,
)
from tinker_server.observability.log_config import harmless
from tinker_server.web.deps import ServedModels

log = logging.getLogger(__name__)
router = APIRouter()
MAX_KINDS, MAX_EVENT_CHARS, MAX_VALUE_CHARS = 20, 500, 100
"""Bounds on the log lines of a request: a line for each kind of event."""
_NOT_REPEATED = frozenset({"event", "event_id", "event_session_index", "timestamp", "severity", "event_name"})
_STACKS = frozenset({"traceback", "exception_stack"})
"""Fields of many lines each, which the client has shown too."""


@router.post("/client/config")
async def client_config(_: ClientConfigRequest) -> ClientConfigResponse:
    """Return flags that steer the SDK."""
    return ClientConfigResponse()


@router.post("/client/dynamic_config")
async def dynamic_config(_: ClientConfigRequest) -> DynamicConfigResponse:
    """Return flags that the SDK asks for again periodically."""
    return DynamicConfigResponse()


@router.post("/telemetry")
async def telemetry(batch: TelemetryRequest) -> TelemetryResponse:
    """Log a client's own view of its session without its keys, a line for all events of a kind.

    A client reports every failed poll and retry: a hundred events of a kind are not unusual.
    """
    client = harmless(f"client of session {batch.session_id[:100]} (SDK {batch.sdk_version[:20]})")
    kinds: dict[str, list[dict[str, object]]] = {}
    for event in batch.events:
        kinds.setdefault(_kind(event), []).append(event)
    for events in list(kinds.values())[:MAX_KINDS]:
        count = f"{len(events)} of a kind, the first: " if len(events) > 1 else ""
        log.info("%s: %s%s", client, count, harmless(_line(events[0]))[:MAX_EVENT_CHARS])
    if len(kinds) > MAX_KINDS:
        log.info("%s: %d more kinds of events, which are not logged", client, len(kinds) - MAX_KINDS)
    return TelemetryResponse()


def _kind(event: dict[str, object]) -> str:
    """Return a key that is equal for events that differ only in the request that they are about."""
    names = ("event", "event_name", "severity", "error_type", "exception_type")
    return str([event.get(name) for name in names])[:MAX_EVENT_CHARS]


def _line(event: dict[str, object]) -> str:
    """Format an event as a short line without stack traces."""
    data = event.get("event_data")
    fields = {**event, **(data if isinstance(data, dict) else {})}
    title = [str(event[name]) for name in ("severity", "event_name", "event") if isinstance(event.get(name), str)]
    parts = [
        f"{name}={harmless(json.dumps(value))[:MAX_VALUE_CHARS]}"  # before the cut: half a key is not recognised
        for name, value in fields.items()
        if name not in _NOT_REPEATED | _STACKS | {"event_data"} and value is not None
    ]
    return " ".join([*title[:2], *parts])


@router.get("/get_server_capabilities")
async def get_server_capabilities(models: ServedModels) -> ServerCapabilities:
    """List the served base models."""
    return ServerCapabilities(
        supported_models=[
            SupportedModel(model_name=name, max_context_length=base.info.max_context_length)
            for name, base in models.served.items()
        ]
    )
