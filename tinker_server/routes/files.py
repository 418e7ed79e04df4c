"""Downloads and uploads by signed URL, with a plain GET, HEAD or PUT and no API key."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, StreamingResponse

from tinker_server.api_schemas.checkpoints import UploadedFileResponse
from tinker_server.api_schemas.wire import JSON
from tinker_server.errors import (
    BadRequest,
    BodyTooLarge,
    Busy,
    DiskFull,
    LimitReached,
    LinkRefused,
    TinkerServerError,
    UnknownCheckpoint,
    UnknownSession,
    UnknownUpload,
)
from tinker_server.store.catalog import OperationRecord
from tinker_server.store.records import Session
from tinker_server.web.deps import ArchivesDep, CatalogDep, Runs, Sessions, StorageDep, UploadsDep
from tinker_server.web.parameters import FollowedLink, SessionIdInPath
from tinker_server.web.refusals import BINARY, DOWNLOAD, Described, describe

router = APIRouter()
H = TypeVar("H", bound=Callable[..., Any])
UPLOADED = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BINARY}}}}
MICROS = 1_000_000
OPERATIONS_AT_ONCE = 500
"""Operations of a trace that are encoded at once, which takes a few milliseconds."""
TRACE: Described = {
    200: {"description": "Trace Event Format", "content": {JSON: {"schema": {"type": "object"}}}},
}


def _download(path: str, *refusals: type[TinkerServerError]) -> Callable[[H], H]:
    """Return a decorator that adds a handler which sends a file to GET, and to HEAD its size alone."""

    def add(handler: H) -> H:
        for method in ("GET", "HEAD"):
            described = DOWNLOAD | describe(LinkRefused, UnknownCheckpoint, *refusals)
            router.add_api_route(path, handler, methods=[method], response_class=FileResponse, responses=described)
        return handler

    return add


@_download("/files/{path:path}")
async def get_file(
    path: Annotated[str, PathParameter(description="The file that the link opens.")],
    link: FollowedLink,
    storage: StorageDep,
) -> Response:
    """Download a file of exported weights."""
    link.require_to(f"files/{path}")
    return await _file(storage.below_checkpoints(path))


@_download("/archives/{directory:path}", LimitReached)
async def get_archive(
    directory: Annotated[str, PathParameter(description="The weights that the link opens.")],
    link: FollowedLink,
    archives: ArchivesDep,
    runs: Runs,
) -> Response:
    """Download weights as a tar.gz, which is packed on the first request."""
    link.require_to(f"archives/{directory}")
    run = await runs.get(directory.split("/")[1])
    try:
        return await _file(await archives.get(directory, run.owner))
    except FileNotFoundError:
        raise UnknownCheckpoint("the weights were deleted") from None


@router.put(
    "/uploads/{upload_id}/{name}",
    responses=describe(BadRequest, LinkRefused, UnknownUpload, BodyTooLarge, Busy, DiskFull),
    openapi_extra=UPLOADED,
)
async def put_file(
    upload_id: Annotated[str, PathParameter(description="An upload that has been started.")],
    name: Annotated[str, PathParameter(description="Name of the file.")],
    link: FollowedLink,
    uploads: UploadsDep,
    http: Request,
) -> UploadedFileResponse:
    """Send a file of an adapter. It replaces the file that was sent before."""
    link.require_to(f"uploads/{upload_id}/{name}")
    upload = uploads.require_open(upload_id, name)
    try:
        async with asyncio.timeout(max(0, link.expires - time.time())):
            size_bytes = await uploads.folder.receive(upload, name, http.stream())
    except TimeoutError:
        raise LinkRefused("the link has expired; start another upload") from None
    return UploadedFileResponse(size_bytes=size_bytes)


@router.get("/traces/{session_id}", responses=TRACE | describe(LinkRefused, UnknownSession))
async def get_trace(
    session_id: SessionIdInPath, link: FollowedLink, sessions: Sessions, catalog: CatalogDep
) -> Response:
    """Download a session's operations in the Trace Event Format, which ui.perfetto.dev opens.

    Each model or sampling session is one track; a bar lasts from the acceptance of an operation to its result.
    """
    link.require_to(f"traces/{session_id}")
    session = await sessions.get(session_id)
    pages = catalog.operations(session_id, OPERATIONS_AT_ONCE)
    return StreamingResponse(_trace(session, pages), media_type=JSON)


async def _trace(session: Session, pages: AsyncIterator[list[OperationRecord]]) -> AsyncIterator[str]:
    """Yield the trace as text in parts: a session may have hundreds of thousands of operations."""
    head = {"displayTimeUnit": "ms", "otherData": {"session_id": session.session_id}}
    yield json.dumps(head)[:-1] + ', "traceEvents": ['
    comma = ""
    async for page in pages:
        yield comma + ",".join(json.dumps(_event(session, operation)) for operation in page)
        comma = ","
    yield "]}"


def _event(session: Session, operation: OperationRecord) -> dict[str, object]:
    end = operation.finished_at
    return {
        "name": operation.kind,
        "cat": operation.status,
        "ph": "X" if end is not None else "B",
        "pid": session.session_id,
        "tid": operation.lane,
        "ts": (operation.created_at - session.created_at) * MICROS,
        **({} if end is None else {"dur": (end - operation.created_at) * MICROS}),
        "args": {"seq_id": operation.seq_id, "status": operation.status},
    }


async def _file(path: Path) -> Response:
    if not await asyncio.to_thread(path.is_file):
        raise UnknownCheckpoint("the file was deleted")
    return FileResponse(path, filename=path.name, media_type="application/octet-stream")
