"""Downloads by signed URL, for plain GETs without an API key."""

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, JSONResponse

from api_schemas.wire import JSON
from tinker_server.errors import LinkRefused, UnknownCheckpoint, UnknownSession
from tinker_server.web.deps import ArchivesDep, CatalogDep, Sessions, SignedLinks, StorageDep
from tinker_server.web.parameters import LinkEnd, LinkSignature, SessionIdInPath
from tinker_server.web.refusals import DOWNLOAD, Described, refused

router = APIRouter()
MICROS = 1_000_000
TRACE: Described = {
    200: {"description": "Trace Event Format", "content": {JSON: {"schema": {"type": "object"}}}},
}


@router.get(
    "/files/{path:path}", response_class=FileResponse, responses=DOWNLOAD | refused(LinkRefused, UnknownCheckpoint)
)
async def get_file(
    path: Annotated[str, PathParameter(description="The file that the link opens.")],
    expires: LinkEnd,
    signature: LinkSignature,
    storage: StorageDep,
    links: SignedLinks,
) -> Response:
    """One file of exported weights."""
    links.check(f"files/{path}", expires, signature)
    return await _file(storage.downloadable(path))


@router.get(
    "/archives/{directory:path}",
    response_class=FileResponse,
    responses=DOWNLOAD | refused(LinkRefused, UnknownCheckpoint),
)
async def get_archive(
    directory: Annotated[str, PathParameter(description="The weights that the link opens.")],
    expires: LinkEnd,
    signature: LinkSignature,
    archives: ArchivesDep,
    links: SignedLinks,
) -> Response:
    """Weights as one tar.gz, packed when first asked for."""
    links.check(f"archives/{directory}", expires, signature)
    try:
        return await _file(await archives.get(directory))
    except FileNotFoundError:
        raise UnknownCheckpoint("the weights were deleted") from None


@router.get("/traces/{session_id}", responses=TRACE | refused(LinkRefused, UnknownSession))
async def get_trace(
    session_id: SessionIdInPath,
    expires: LinkEnd,
    signature: LinkSignature,
    sessions: Sessions,
    catalog: CatalogDep,
    links: SignedLinks,
) -> Response:
    """A session's operations in the Trace Event Format, which ui.perfetto.dev opens.

    One row of bars per model or sampling session; a bar lasts from the acceptance of an operation to its result.
    """
    links.check(f"traces/{session_id}", expires, signature)
    session = await sessions.get(session_id)
    events = [
        {
            "name": kind,
            "cat": status,
            "ph": "X" if finished_at is not None else "B",
            "pid": session_id,
            "tid": lane,
            "ts": (created_at - session.created_at) * MICROS,
            **({} if finished_at is None else {"dur": (finished_at - created_at) * MICROS}),
            "args": {"seq_id": seq_id, "status": status},
        }
        for kind, lane, seq_id, status, created_at, finished_at in await catalog.operations(session_id)
    ]
    return JSONResponse({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"session_id": session_id}})


async def _file(path: Path) -> Response:
    if not await asyncio.to_thread(path.is_file):
        raise UnknownCheckpoint("the file was deleted")
    return FileResponse(path, filename=path.name, media_type="application/octet-stream")
