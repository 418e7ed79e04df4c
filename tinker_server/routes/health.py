"""Whether the server lives: for load balancers and containers, which have no API key."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import APIRouter

from api_schemas.service import HealthResponse
from tinker_server.errors import DiskFull
from tinker_server.web.deps import AppSettings
from tinker_server.web.refusals import refused

router = APIRouter()
MIN_FREE_BYTES = 64 << 20
"""Less is soon filled by one result or one saved adapter."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="health")
"""Of its own: the others may all be decoding, and who is not answered in time is restarted."""


@router.get("/healthz", responses=refused(DiskFull))
async def healthz(settings: AppSettings) -> HealthResponse:
    """Whether the server takes requests, and has room to store them."""
    await asyncio.get_running_loop().run_in_executor(_THREAD, require_room, settings.data_dir)
    return HealthResponse()


def require_room(data_dir: Path) -> None:
    """Raises DiskFull."""
    try:
        found = os.statvfs(data_dir)
    except OSError as error:
        raise DiskFull(f"the data directory cannot be reached: {error.strerror}") from None
    if found.f_flag & os.ST_RDONLY or not os.access(data_dir, os.W_OK):
        raise DiskFull("the data directory cannot be written")
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < MIN_FREE_BYTES:
        raise DiskFull(f"the disk of the data directory has only {free_bytes >> 20} MiB left")
