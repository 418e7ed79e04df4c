"""Routes for sessions: each of a client, alive while its heartbeats arrive."""

import time

from fastapi import APIRouter, Response

from tinker_server.api_schemas.ids import owner_urn
from tinker_server.api_schemas.listing import from_unix
from tinker_server.api_schemas.sessions import (
    AssignProjectRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishReason,
    FinishSessionRequest,
    GetSessionResponse,
    ListSessionsResponse,
    SearchCursor,
    SearchSessionsRequest,
    SearchSessionsResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionStatus,
    SessionSummary,
)
from tinker_server.errors import BadRequest, Busy, HeartbeatEnded, ScopeRefused, UnknownSession
from tinker_server.store.catalog import ACTIVE_S, DEFAULT_PROJECT, SessionRecord
from tinker_server.store.records import Session
from tinker_server.web.deps import Audit, Caller, CatalogDep, KnownKey, Runs, Server, Sessions
from tinker_server.web.parameters import AskedScope, IdempotencyKey, SessionIdInPath, ShortPage
from tinker_server.web.refusals import describe

router = APIRouter()


@router.post("/create_session", responses=describe(Busy))
async def create_session(
    request: CreateSessionRequest,
    server: Server,
    caller: Caller,
    x_idempotency_key: IdempotencyKey = None,
) -> CreateSessionResponse:
    """Start a session. A retry with the same idempotency key gets the first session."""
    server.records.add(caller, len(request.model_dump_json()))
    return CreateSessionResponse(session_id=await server.sessions.create(request, x_idempotency_key, caller))


@router.post("/session_heartbeat", responses=describe(UnknownSession, HeartbeatEnded))
async def session_heartbeat(
    request: SessionHeartbeatRequest, sessions: Sessions, caller: Caller
) -> SessionHeartbeatResponse:
    """Report that the client is alive; 404 for an unknown session, 410 for a finished session."""
    await sessions.heartbeat(request.session_id, caller)
    return SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204, responses=describe(UnknownSession, ScopeRefused))
async def finish_session(
    session_id: SessionIdInPath, request: FinishSessionRequest, sessions: Sessions, runs: Runs, key: KnownKey
) -> Response:
    """Finish a session. Repeating it changes nothing."""
    if key.scope != "all" and await runs.are_in(session_id):
        raise ScopeRefused(f"the API key {key.id} of {key.name} may not train, so it may finish no session with models")
    await sessions.finish(session_id, request, key.name)
    return Response(status_code=204)


@router.get("/sessions")
async def list_sessions(catalog: CatalogDep, page: ShortPage) -> ListSessionsResponse:
    """List the ids of the caller's sessions, newest first."""
    return ListSessionsResponse(sessions=await catalog.sessions(page))


@router.post("/sessions/search", response_model_exclude_none=True, responses=describe(BadRequest))
async def search_sessions(
    request: SearchSessionsRequest, sessions: Sessions, catalog: CatalogDep, caller: Caller
) -> SearchSessionsResponse:
    """List the sessions that match, newest first, a page at a time."""
    if request.owner.type == "user" and caller not in (request.owner.owner_urns or []):
        return SearchSessionsResponse(sessions=[])
    await sessions.save_heartbeats()  # the search reads them from the database
    now = time.time()
    page, has_more = await catalog.search(request, caller, now)
    next_cursor = None
    if has_more:
        last = page[-1].session
        next_cursor = SearchCursor(last_created_at=from_unix(last.created_at), last_session_id=last.session_id)
    return SearchSessionsResponse(sessions=[_summary(record, now) for record in page], next_cursor=next_cursor)


@router.get("/sessions/{session_id}", response_model_exclude_none=True, responses=describe(UnknownSession))
async def get_session(
    session_id: SessionIdInPath, sessions: Sessions, catalog: CatalogDep, scope: AskedScope
) -> GetSessionResponse:
    """Return a session's models and sampling sessions."""
    row = await sessions.require(session_id, scope.owner)
    run_ids, sampler_ids = await catalog.of_session(session_id)
    return GetSessionResponse(
        training_run_ids=run_ids,
        sampler_ids=sampler_ids,
        user_metadata=row.user_metadata,
        display_name=row.display_name,
    )


@router.put("/sessions/{session_id}/project", status_code=204, responses=describe(UnknownSession, Busy))
async def assign_project(
    session_id: SessionIdInPath, request: AssignProjectRequest, sessions: Sessions, audit: Audit, caller: Caller
) -> Response:
    """Move a session, with everything that it made, to a project. A project is only a name here."""
    audit.admit(caller)
    await sessions.assign_project(session_id, request.project_id, caller)
    await audit.note("project_assigned", caller, session_id=session_id, project_id=request.project_id)
    return Response(status_code=204)


def _summary(record: SessionRecord, now: float) -> SessionSummary:
    row = record.session
    return SessionSummary(
        session_id=row.session_id,
        created_at=from_unix(row.created_at),
        owner=owner_urn(row.owner),
        project_id=row.project_id or DEFAULT_PROJECT,
        status=_status(row, now),
        checkpoints_count=record.checkpoints_count,
        checkpoint_storage_bytes=record.size_bytes,
        display_name=row.display_name,
        user_metadata=row.user_metadata,
    )


def _status(row: Session, now: float) -> SessionStatus | None:
    if row.finished_at is not None:
        reason = FinishReason.model_validate({"type": row.finish_reason})
        return SessionStatus(type="client_finished", reason=reason, detail=row.finish_detail)
    return SessionStatus(type="active") if row.last_heartbeat > now - ACTIVE_S else None
