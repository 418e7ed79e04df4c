"""Images by address, read only from the directories and hosts that the operator allows."""

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from tinker_server.errors import BadRequest

READ_S = 10.0
"""Time limit for one image."""
MAX_BYTES = 20 << 20
_KINDS = {"image/png", "image/jpeg"}


@dataclass(frozen=True)
class ImageAddresses:
    """Hosts and directories that images may be read from."""

    hosts: Sequence[str]
    """Host names, with the port if an address has one."""
    directories: Sequence[Path]
    max_bytes: int
    """Bytes of all images that one request names; one that is named twice counts twice."""

    async def read_all(self, addresses: Iterable[str], where: str) -> dict[str, bytes]:
        """Read the images that a request names, each address once. Raises BadRequest as `read` does, and for too many
        bytes in all; `where` says what of the request names them.
        """
        files: dict[str, bytes] = {}
        named = Counter(addresses)
        for address in named:
            files[address] = await self.read(address)
            if sum(len(data) * named[one] for one, data in files.items()) > self.max_bytes:
                raise BadRequest(f"the images that {where} name have more than {self.max_bytes} bytes in all")
        return files

    async def read(self, address: str) -> bytes:
        """Read a file of at most MAX_BYTES. Raises BadRequest if it is not allowed, or cannot be read."""
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
            raise BadRequest(f"the image {_short(address)} was not read within {READ_S:.0f} s") from None
        except OSError as error:
            raise BadRequest(f"the image {_short(address)} cannot be read ({type(error).__name__})") from None
        raise BadRequest(
            f"the image {_short(address)} is not read: send the file's bytes, or have the operator name its host in the"
            " setting image_hosts or its directory in image_directories"
        )

    def _allowed(self, name: str) -> Path | None:
        """Resolve links, then return the path if it is within an allowed directory."""
        path = Path(os.path.realpath(name)) if name.startswith("/") and "\0" not in name else None
        roots = [directory.resolve() for directory in self.directories]
        return path if path is not None and any(path.is_relative_to(root) for root in roots) else None


async def _fetched(address: str) -> bytes:
    """Fetch an image without following redirects, which could lead to a host that is not allowed."""
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
    # Opening a pipe would block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
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
