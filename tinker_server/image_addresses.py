"""Images by address, read only from the directories and hosts that the operator allows."""

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tinker_server.accounts import Accounts
from tinker_server.backends.processes.fair_threads import FairThreads
from tinker_server.errors import BadRequest
from tinker_server.image_hosts import fetch

MAX_BYTES = 20 << 20
MAX_ADDRESSES = 4096
"""Different addresses in one request."""
_FILES = FairThreads(8, "image files", of_owner=4)
"""Threads that read files, whose disk may not answer: nothing else waits for them."""
_READING = Accounts(1, 8, "images by address are being read; send the request again later")
"""Requests whose images are read, of an owner and of all: their bytes are counted once they are there."""


@dataclass(frozen=True)
class ImageAddresses:
    """Hosts and directories that images may be read from."""

    hosts: Sequence[str]
    """Host names and addresses, with the port if a URL has one."""
    directories: Sequence[Path]
    max_bytes: int
    """Bytes of all images that one request names; one that is named twice counts twice."""

    async def read_all(self, named_at: Sequence[tuple[str, str]], where: str, owner: str) -> dict[str, bytes]:
        """Read the images that an owner's request names, each address once, and after those of the owner's requests
        before it. `named_at` has the place of each address in the request. Raises BadRequest as `read` does, with the
        place, and for too many addresses, or too many bytes in all; `where` says what of the request names them. Raises
        Busy if others take long.
        """
        named = Counter(address for _, address in named_at)
        if len(named) > MAX_ADDRESSES:
            raise BadRequest(f"{where} name {len(named)} addresses of images; {MAX_ADDRESSES} are allowed")
        if not named:
            return {}
        places = {address: place for place, address in reversed(named_at)}
        files: dict[str, bytes] = {}
        num_bytes = 0
        async with _READING.hold(owner):
            for address, times in named.items():
                try:
                    files[address] = await self.read(address, owner)
                except BadRequest as error:
                    raise BadRequest(f"{places[address]}: {error}") from None
                num_bytes += len(files[address]) * times
                if num_bytes > self.max_bytes:
                    raise BadRequest(f"the images that {where} name have more than {self.max_bytes} bytes in all")
        return files

    async def read(self, address: str, owner: str) -> bytes:
        """Read a file of at most MAX_BYTES. Raises BadRequest if it is not allowed, or cannot be read."""
        try:
            parts = urlsplit(address)
            scheme, host, path = parts.scheme, parts.netloc, unquote(parts.path)
        except ValueError:
            scheme, host, path = "", "", ""
        data = None
        if scheme in ("http", "https"):
            data = await fetch(address, self.hosts, MAX_BYTES, owner)
        elif scheme in ("", "file") and not host:
            try:
                data = await _FILES.run(owner, self._read, path)
            except OSError as error:
                raise BadRequest(f"the image {_short(address)} cannot be read ({type(error).__name__})") from None
        if data is not None:
            return data
        raise BadRequest(
            f"the image {_short(address)} is not read: send the file's bytes, or have the operator name its host in the"
            " setting image_hosts or its directory in image_directories"
        )

    def _read(self, name: str) -> bytes | None:
        """Return the file, or None if it is in no allowed directory."""
        path = self._resolve(name)
        return None if path is None else _read(path)

    def _resolve(self, name: str) -> Path | None:
        """Resolve links, then return the path if it is within an allowed directory."""
        path = Path(os.path.realpath(name)) if name.startswith("/") and "\0" not in name else None
        roots = [directory.resolve() for directory in self.directories]
        return path if path is not None and any(path.is_relative_to(root) for root in roots) else None


def _read(path: Path) -> bytes:
    # Opening a pipe would block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(path)
        if found.st_size > MAX_BYTES:
            raise BadRequest(f"{_short(path.name)} has more than {MAX_BYTES} bytes")
        return file.read(MAX_BYTES)


def _short(address: str) -> str:
    return repr(address[:100])
