"""The service itself: configuration of clients, capabilities, telemetry."""

import json
import logging
import re

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
from tinker_server.web.deps import ServedModels

log = logging.getLogger(__name__)
router = APIRouter()
_KEY = re.compile(r"tml-[\w.-]+|eyJ[\w.-]+")
MAX_EVENT_CHARS = 2000


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
    for event in batch.events:
        text = _KEY.sub("[key]", json.dumps(event))[:MAX_EVENT_CHARS]
        log.info("client of session %s (SDK %s): %s", batch.session_id, batch.sdk_version, text)
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
