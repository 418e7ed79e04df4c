"""The service itself: configuration of clients, capabilities, telemetry."""

import json
import logging

from fastapi import APIRouter

from api_schemas.service import (
    ClientConfigRequest,
    ClientConfigResponse,
    DynamicConfigResponse,
    ServerCapabilities,
    SupportedModel,
    TelemetryRequest,
    TelemetryResponse,
)
from tinker_server.logs import harmless
from tinker_server.web.deps import ServedModels

log = logging.getLogger(__name__)
router = APIRouter()
MAX_EVENTS, MAX_EVENT_CHARS = 20, 2000
"""What is logged of one request at most."""


@router.post("/client/config")
async def client_config(_: ClientConfigRequest) -> ClientConfigResponse:
    """Flags that steer the SDK."""
    return ClientConfigResponse()


@router.post("/client/dynamic_config")
async def dynamic_config(_: ClientConfigRequest) -> DynamicConfigResponse:
    """Flags that the SDK asks for again from time to time."""
    return DynamicConfigResponse()


@router.post("/telemetry")
async def telemetry(batch: TelemetryRequest) -> TelemetryResponse:
    """A client's own view of its session, logged without its keys."""
    client = harmless(f"client of session {batch.session_id[:100]} (SDK {batch.sdk_version[:20]})")
    for event in batch.events[:MAX_EVENTS]:
        log.info("%s: %s", client, harmless(json.dumps(event))[:MAX_EVENT_CHARS])
    if len(batch.events) > MAX_EVENTS:
        log.info("%s: %d more events, which are not logged", client, len(batch.events) - MAX_EVENTS)
    return TelemetryResponse()


@router.get("/get_server_capabilities")
async def get_server_capabilities(models: ServedModels) -> ServerCapabilities:
    """The served base models."""
    return ServerCapabilities(
        supported_models=[
            SupportedModel(model_name=name, max_context_length=base.info.max_context_length)
            for name, base in models.served.items()
        ]
    )
