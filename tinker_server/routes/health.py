"""Liveness and version for load balancers, containers and operators, who have no API key."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import APIRouter

from tinker_server.api_schemas.service import HealthResponse
from tinker_server.errors import DiskFull, StillStarting
from tinker_server.release import release
from tinker_server.web.deps import AppSettings
from tinker_server.web.refusals import describe

router, for_operators = APIRouter(), APIRouter(include_in_schema=False)
MIN_FREE_BYTES = 64 << 20
"""Less room than this is soon filled by a result or a saved adapter."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="health")
"""The check has its own thread: the shared threads may all be decoding, and a late answer gets the server restarted."""


@router.get("/healthz", responses=describe(DiskFull, StillStarting))
async def healthz(settings: AppSettings) -> HealthResponse:
    """Answer 200 if the server is ready and has room to store requests."""
    await asyncio.get_running_loop().run_in_executor(_THREAD, require_room, settings.data_dir)
    return HealthResponse()


@for_operators.get("/health")
async def health(settings: AppSettings) -> HealthResponse:
    """Answer as `healthz` does, at the path where other model servers have it."""
    return await healthz(settings)


@for_operators.get("/version")
async def show_version() -> dict[str, str]:
    """Return the server's version and commit."""
    return release()._asdict()


def require_room(data_dir: Path) -> None:
    """Raise DiskFull if the data directory cannot be written or is nearly full."""
    try:
        found = os.statvfs(data_dir)
    except OSError as error:
        raise DiskFull(f"the data directory cannot be reached: {error.strerror}") from None
    if found.f_flag & os.ST_RDONLY or not os.access(data_dir, os.W_OK):
        raise DiskFull("the data directory cannot be written")
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < MIN_FREE_BYTES:
        raise DiskFull(f"the disk of the data directory has only {free_bytes >> 20} MiB left")
