"""Images by their address: read from the directories and fetched from the hosts that the operator named, from nothing
else."""

import asyncio
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from tinker_server.errors import BadRequest

READ_S = 10.0
"""For the whole of one image."""
MAX_BYTES = 20 << 20
_KINDS = {"image/png", "image/jpeg"}


@dataclass(frozen=True)
class ImageAddresses:
    """Where images may come from."""

    hosts: Sequence[str]
    """With the port where an address has one."""
    directories: Sequence[Path]

    async def read(self, address: str) -> bytes:
        """The file, of 20 MB at most. Raises BadRequest for what may not be read, or cannot."""
        try:
            parts = urlsplit(address)
            scheme, host, path = parts.scheme, parts.netloc.rpartition("@")[2].lower(), unquote(parts.path)
        except ValueError:
            scheme, host, path = "", "", ""
        try:
            async with asyncio.timeout(READ_S):
                if scheme in ("http", "https") and host in self.hosts:
                    return await _fetched(address)
                if scheme in ("", "file") and not host and (file := self._allowed(path)) is not None:
                    return await asyncio.to_thread(_read, file)
        except TimeoutError:
            raise BadRequest(f"the image {_short(address)} was not there within {READ_S:.0f} s") from None
        except OSError as error:
            raise BadRequest(f"the image {_short(address)} cannot be read ({type(error).__name__})") from None
        raise BadRequest(
            f"the image {_short(address)} is not read: send the file's bytes, or have the operator name its host in the"
            " setting image_hosts or its directory in image_directories"
        )

    def _allowed(self, name: str) -> Path | None:
        """Links are followed first: one that leads out of the directories is not allowed."""
        path = Path(os.path.realpath(name)) if name.startswith("/") and "\0" not in name else None
        roots = [directory.resolve() for directory in self.directories]
        return path if path is not None and any(path.is_relative_to(root) for root in roots) else None


async def _fetched(address: str) -> bytes:
    """No redirect is followed: it would lead to a host that nobody named."""
    data = bytearray()
    try:
        async with (
            httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=READ_S) as client,
            client.stream("GET", address) as answer,
        ):
            kind = answer.headers.get("content-type", "").partition(";")[0].strip()
            if answer.status_code != 200 or kind not in _KINDS:
                raise BadRequest(f"{_short(address)} answers {answer.status_code} with {kind or 'nothing'}")
            async for piece in answer.aiter_bytes():
                data += piece
                _require_small(len(data), address)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadRequest(f"{_short(address)} cannot be fetched ({type(error).__name__})") from None
    return bytes(data)


def _read(path: Path) -> bytes:
    # A pipe would keep whoever opens it waiting.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(path)
        _require_small(found.st_size, path.name)
        return file.read(MAX_BYTES)


def _require_small(num_bytes: int, address: str) -> None:
    if num_bytes > MAX_BYTES:
        raise BadRequest(f"{_short(address)} has more than {MAX_BYTES} bytes")


def _short(address: str) -> str:
    return repr(address[:100])
