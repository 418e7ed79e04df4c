"""Sessions: one per client, alive while heartbeats come."""

from typing import Annotated

from fastapi import APIRouter, Header, Response

from api_schemas.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)
from tinker_server.deps import Sessions

router = APIRouter()


@router.post("/create_session")
async def create_session(
    request: CreateSessionRequest, sessions: Sessions, x_idempotency_key: Annotated[str | None, Header()] = None
) -> CreateSessionResponse:
    """Start a session. A retry, which has the same key, gets the first one's."""
    return CreateSessionResponse(session_id=await sessions.create(request, x_idempotency_key))


@router.post("/session_heartbeat")
async def session_heartbeat(request: SessionHeartbeatRequest, sessions: Sessions) -> SessionHeartbeatResponse:
    """Say that the client lives; 404 for an unknown session, 410 for a finished one."""
    await sessions.heartbeat(request.session_id)
    return SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(session_id: str, request: FinishSessionRequest, sessions: Sessions) -> Response:
    """End a session; doing it again changes nothing."""
    await sessions.finish(session_id, request)
    return Response(status_code=204)
