"""Routes for the audit log, usage, stored weights, traces and API keys."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import TypeAdapter

from tinker_server.api_schemas.admin import (
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
from tinker_server.api_schemas.ids import owner_urn
from tinker_server.api_schemas.listing import from_unix
from tinker_server.auth.key import hash_of
from tinker_server.auth.links import VALID_S
from tinker_server.errors import BadRequest, KeysReadOnly, StartFailed, Unauthenticated, UnknownSession
from tinker_server.store.audit import AuditEntry
from tinker_server.store.catalog import DEFAULT_PROJECT
from tinker_server.store.usage import HOUR_S, SessionMetadata, UsageAmount
from tinker_server.web.deps import (
    ApiKey,
    Caller,
    CatalogDep,
    KnownKey,
    Server,
    ServerUrl,
    Services,
    Sessions,
    SignedLinks,
)
from tinker_server.web.parameters import ProjectInQuery, SessionIdInPath
from tinker_server.web.refusals import describe
from tinker_server.web.streaming import entries, join_pages, stream

router = APIRouter()
GIGABYTE = 10**9
_SESSIONS = TypeAdapter(dict[str, UsageSession])
PREFIXES: dict[EventType, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": (),  # there are no teams and organizations here
    "organizations": (),
}


@router.get("/audit", response_model=AuditResponse)
async def get_audit(
    server: Server,
    caller: Caller,
    event_type: Annotated[EventType, Query(description="Kind of entries.")] = "all",
    day: Annotated[date | None, Query(description="A date; absent: today, UTC.")] = None,
) -> Response:
    """Return the audit entries of a day, from midnight to midnight UTC; the default is today."""
    day = day or datetime.now(UTC).date()
    start = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    pages = server.audit.of_day(caller, start, PREFIXES[event_type])
    found = entries(pages, _audit_info, caller)
    return await stream(_whole(b'{"entries":[', found, b"]}"))


@router.get("/billing/usage/events", response_model=UsageResponse, responses=describe(BadRequest))
async def get_usage(
    starting_on: Annotated[datetime, Query(description="Start of the interval; UTC if it has no zone.")],
    ending_before: Annotated[datetime, Query(description="End of the interval; UTC if it has no zone.")],
    server: Server,
    caller: Caller,
) -> Response:
    """Return tokens and checkpoints by hour, session and base model."""
    start, end = _utc(starting_on), _utc(ending_before)
    if end <= start:
        raise BadRequest("ending_before is not after starting_on")
    return await stream(_usage(server, caller, start.timestamp(), end.timestamp()))


async def _whole(head: bytes, parts: AsyncIterator[bytes], tail: bytes) -> AsyncIterator[bytes]:
    first = await anext(parts, b"")  # what fails until here is answered with its status
    yield head + first
    async for part in parts:
        yield part
    yield tail


def _audit_info(entry: AuditEntry) -> AuditEntryInfo:
    details = json.loads(entry.details)
    return AuditEntryInfo(
        timestamp=from_unix(entry.at),
        event=entry.event,
        event_details=details,
        model_id=details.get("model_id"),
        tinker_path=details.get("tinker_path"),
    )


async def _usage(server: Services, owner: str, start: float, end: float) -> AsyncIterator[bytes]:
    """Yield a UsageResponse in parts."""
    session_ids: dict[str, None] = {}
    user_id = owner_urn(owner)

    async def pages() -> AsyncIterator[Sequence[UsageAmount]]:
        async for page in server.usage.between(owner, start, end):
            session_ids.update(dict.fromkeys(usage.session_id for usage in page))
            yield page

    def event(usage: UsageAmount) -> UsageEvent:
        return UsageEvent(
            bucket_start=from_unix(usage.hour),
            bucket_end=from_unix(usage.hour + HOUR_S),
            base_model=usage.base_model,
            user_id=user_id,
            session_id=usage.session_id,
            project_id=usage.project_id or DEFAULT_PROJECT,
            event_info=_event_info(usage.kind, usage.amount),
        )

    async for part in _whole(b'{"data":[', entries(pages(), event, owner), b'],"sessions":{'):
        yield part
    of_sessions = server.usage.metadata(owner, list(session_ids))
    async for part in join_pages(of_sessions, _sessions, owner):
        yield part
    yield b"}}"


def _sessions(page: Sequence[SessionMetadata]) -> bytes:
    """Encode the entries of an object without its braces."""
    shown = {name: UsageSession(user_metadata=json.loads(noted)) for name, noted in page}
    return _SESSIONS.dump_json(shown, exclude_none=True)[1:-1]


@router.get("/billing/usage/checkpoints/current")
async def get_storage(catalog: CatalogDep, caller: Caller, project_id: ProjectInQuery = None) -> StorageUsageResponse:
    """Return the number and size of the saved weights that are stored now, by project."""
    records = await catalog.storage(caller, project_id, time.time())
    return StorageUsageResponse(
        data=[
            StorageUsage(
                project_id=record.project_id,
                org_user_urn=owner_urn(caller),
                checkpoint_count=record.checkpoints_count,
                size_bytes=record.size_bytes,
                size_gigabytes=record.size_bytes / GIGABYTE,
            )
            for record in records
        ]
    )


@router.get("/sessions/{session_id}/trace_export", responses=describe(UnknownSession))
async def export_trace(
    session_id: SessionIdInPath, sessions: Sessions, links: SignedLinks, url: ServerUrl, caller: Caller
) -> TraceExportResponse:
    """Return a signed URL of the session's timeline."""
    await sessions.require(session_id, caller)
    return TraceExportResponse(url=f"{url}/{links.sign(f'traces/{session_id}', int(time.time()) + VALID_S)}")


@router.post("/auth/token")
async def make_token(_: AuthTokenRequest, sent: ApiKey, key: KnownKey, server: Server) -> AuthTokenResponse:
    """Return a token for the key of this request, valid for a day. A token gets no other token."""
    if hash_of(sent) != key.hashed:
        raise Unauthenticated("a token was sent; send the API key itself")
    return AuthTokenResponse(jwt=server.tokens.make(key))


@router.get("/auth/apikey/me")
async def get_api_key(caller: Caller, server: Server) -> ApiKeyResponse:
    """Return the owner that the key of this request belongs to."""
    details = ApiKeyDetails(org_details=Organization(name=caller), user_details=User(email=caller))
    note = "no keys are configured: every one is accepted" if server.keys.is_open else ""
    return ApiKeyResponse(key_id=0, name=caller, note=note, details=details)


@router.delete("/auth/apikey/me", status_code=204, responses=describe(KeysReadOnly))
async def delete_api_key(key: KnownKey, server: Server) -> Response:
    """Revoke the key of this request. Its data stay with the other keys of its name."""
    try:
        server.keys.revoke(key.hashed)
    except OSError as error:
        raise KeysReadOnly(f"the keys of this server cannot be changed from here: {error.strerror}") from None
    except StartFailed:
        raise KeysReadOnly("the keys of this server cannot be changed from here: their file has an error") from None
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
    """Return the time with a zone: UTC, unless it names another."""
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
