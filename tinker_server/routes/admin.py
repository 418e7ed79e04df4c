"""Routes for the audit log, usage, stored weights, traces and API keys."""

import time
from datetime import UTC, date, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api_schemas.admin import (
    ApiKeyDetails,
    ApiKeyResponse,
    AuditEntryInfo,
    AuditResponse,
    AuthTokenRequest,
    AuthTokenResponse,
    CheckpointUsage,
    EventType,
    Organization,
    PrefillUsage,
    StorageUsage,
    StorageUsageResponse,
    TokenUsage,
    TraceExportResponse,
    UsageEvent,
    UsageResponse,
    UsageSession,
    User,
)
from api_schemas.listing import from_unix
from tinker_server.auth.key import hash_of
from tinker_server.auth.links import VALID_S
from tinker_server.errors import BadRequest, KeysReadOnly, Unauthenticated, UnknownSession
from tinker_server.store.catalog import DEFAULT_PROJECT
from tinker_server.store.usage import HOUR_S
from tinker_server.web.deps import (
    ApiKey,
    Audit,
    Caller,
    CatalogDep,
    KnownKey,
    Server,
    ServerUrl,
    Sessions,
    SignedLinks,
    UsageDep,
)
from tinker_server.web.parameters import ProjectInQuery, SessionIdInPath
from tinker_server.web.refusals import refused

router = APIRouter()
GIGABYTE = 10**9
PREFIXES: dict[EventType, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": (),  # there are no teams and organizations here
    "organizations": (),
}


@router.get("/audit", response_model_exclude_none=True)
async def get_audit(
    audit: Audit,
    caller: Caller,
    event_type: Annotated[EventType, Query(description="Kind of entries.")] = "all",
    day: Annotated[date | None, Query(description="A date; absent: today, UTC.")] = None,
) -> AuditResponse:
    """Return the audit entries of one day, from midnight to midnight UTC; the default is today."""
    day = day or datetime.now(UTC).date()
    start = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    return AuditResponse(
        entries=[
            AuditEntryInfo(
                timestamp=from_unix(row.at),
                event=row.event,
                event_details=row.details,
                model_id=row.details.get("model_id"),
                tinker_path=row.details.get("tinker_path"),
            )
            for row in await audit.of_day(caller, start, PREFIXES[event_type])
        ]
    )


@router.get("/billing/usage/events", response_model_exclude_none=True, responses=refused(BadRequest))
async def get_usage(
    starting_on: Annotated[datetime, Query(description="Start of the interval; UTC if it has no zone.")],
    ending_before: Annotated[datetime, Query(description="End of the interval; UTC if it has no zone.")],
    usage: UsageDep,
    caller: Caller,
) -> UsageResponse:
    """Return tokens and checkpoints by hour, session and base model."""
    start, end = _utc(starting_on), _utc(ending_before)
    if end <= start:
        raise BadRequest("ending_before is not after starting_on")
    amounts = await usage.between(caller, start.timestamp(), end.timestamp())
    events = [
        UsageEvent(
            bucket_start=from_unix(used.hour),
            bucket_end=from_unix(used.hour + HOUR_S),
            base_model=used.base_model,
            user_id=caller,
            session_id=used.session_id,
            project_id=(used.session and used.session.project_id) or DEFAULT_PROJECT,
            event_info=_event_info(used.kind, used.amount),
        )
        for used in amounts
    ]
    sessions = {
        used.session_id: UsageSession(user_metadata=used.session.user_metadata)
        for used in amounts
        if used.session is not None
    }
    return UsageResponse(data=events, sessions=sessions)


@router.get("/billing/usage/checkpoints/current")
async def get_storage(catalog: CatalogDep, caller: Caller, project_id: ProjectInQuery = None) -> StorageUsageResponse:
    """Return the number and size of the saved weights that are stored now, by project."""
    records = await catalog.storage(caller, project_id, time.time())
    return StorageUsageResponse(
        data=[
            StorageUsage(
                project_id=record.project_id,
                org_user_urn=caller,
                checkpoint_count=record.checkpoints_count,
                size_bytes=record.size_bytes,
                size_gigabytes=record.size_bytes / GIGABYTE,
            )
            for record in records
        ]
    )


@router.get("/sessions/{session_id}/trace_export", responses=refused(UnknownSession))
async def export_trace(
    session_id: SessionIdInPath, sessions: Sessions, links: SignedLinks, url: ServerUrl, caller: Caller
) -> TraceExportResponse:
    """Return a signed URL of the session's timeline."""
    await sessions.require(session_id, caller)
    return TraceExportResponse(url=f"{url}/{links.sign(f'traces/{session_id}', int(time.time()) + VALID_S)}")


@router.post("/auth/token")
async def make_token(_: AuthTokenRequest, sent: ApiKey, key: KnownKey, server: Server) -> AuthTokenResponse:
    """Return a token for the key of this request, valid for a day. A token gets no other one."""
    if hash_of(sent) != key.hashed:
        raise Unauthenticated("a token was sent; send the API key itself")
    return AuthTokenResponse(jwt=server.tokens.make(key))


@router.get("/auth/apikey/me")
async def get_api_key(caller: Caller, server: Server) -> ApiKeyResponse:
    """Return the owner that the key of this request belongs to."""
    details = ApiKeyDetails(org_details=Organization(name=caller), user_details=User(email=caller))
    note = "no keys are configured: every one is accepted" if server.keys.is_open else ""
    return ApiKeyResponse(key_id=0, name=caller, note=note, details=details)


@router.delete("/auth/apikey/me", status_code=204, responses=refused(KeysReadOnly))
async def delete_api_key(key: KnownKey, server: Server) -> Response:
    """Revoke the key of this request. Its data stay with the other keys of its name."""
    try:
        server.keys.revoke(key.hashed)
    except OSError as error:
        raise KeysReadOnly(f"the keys of this server cannot be changed from here: {error.strerror}") from None
    return Response(status_code=204)


def _event_info(kind: str, amount: int) -> TokenUsage | PrefillUsage | CheckpointUsage:
    match kind:
        case "training":
            return TokenUsage(type="training", token_count=amount)
        case "sampled":
            return TokenUsage(type="sampling_sample", token_count=amount)
        case "prefill" | "cached_prefill":
            return PrefillUsage(cached=kind == "cached_prefill", token_count=amount)
        case "checkpoint":
            return CheckpointUsage(count=amount)
    raise AssertionError(f"{kind} is not counted")


def _utc(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
