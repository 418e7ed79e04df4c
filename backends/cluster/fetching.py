"""A base model's files, sent by the server to a machine that has neither their directory nor the model's hub id.

They lie in a directory by their fingerprint, so that they are sent once. A file is hashed on both sides as it travels;
what has arrived before the connection ended is not sent again.
"""

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from tinker_server.backends.cluster.handshake import Connection, connect
from tinker_server.backends.formats.base_files import find_needed_files
from tinker_server.backends.formats.model_files import fingerprint
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20
_SPARE_BYTES = 1 << 30
"""Part of the disk that stays free."""
_GIB = 1 << 30


class _Interrupted(BackendFailed):
    """The connection ended, or the checksum of a file does not match."""


async def give(connection: Connection, directory: Path) -> None:
    """Send a model's files as a machine asks for them."""
    found = await asyncio.to_thread(find_needed_files, directory)
    identity = await asyncio.to_thread(fingerprint, directory)
    connection.send(fingerprint=identity, files={name: path.stat().st_size for name, path in found.items()})
    while (asked := await connection.receive()) is not None:
        with found[str(asked["file"])].open("rb") as file:
            hashed = await asyncio.to_thread(_hash_beginning, file, int(asked["offset"]))
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                await asyncio.to_thread(hashed.update, piece)
                connection.writer.write(piece)
                await connection.writer.drain()
        connection.send(sha256=hashed.hexdigest())


async def fetch_files(server: str, token: str, name: str, cache: Path) -> Path:
    """Return the directory of a served model's files beneath `cache`, with those that are missing fetched from the
    server. Raises BackendFailed."""
    before = -1
    while True:
        connection = await connect(server, token, ask="model", name=name)
        try:
            return await _fetch(connection, name, cache)
        except _Interrupted as error:
            if (now := await asyncio.to_thread(_size, cache)) <= before:
                raise
            before = now
            log.warning("%s; retrying", error)
        finally:
            connection.close()


async def _fetch(connection: Connection, name: str, cache: Path) -> Path:
    identity = str(connection.said["fingerprint"])
    files = {_require_inside(name): int(size) for name, size in connection.said["files"].items()}
    directory, aside = cache / identity, cache / f"{identity}.part"
    if directory.is_dir():
        return directory
    aside.mkdir(parents=True, exist_ok=True)
    missing = _missing(files, aside)
    _require_room(name, sum(missing.values()), aside)
    log.info("fetches %.2f GiB of %s into %s", sum(missing.values()) / _GIB, name, directory)
    for file_name in missing:
        await _fetch_file(connection, file_name, aside / file_name, files[file_name])
    aside.rename(directory)
    return directory


async def _fetch_file(connection: Connection, name: str, path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    with partial.open("a+b") as file:
        if file.tell() > size:
            file.truncate(0)
        offset = file.tell()
        connection.send(file=name, offset=offset)
        file.seek(0)
        hashed = await asyncio.to_thread(_hash_beginning, file, offset)
        while offset < size:
            piece = await connection.reader.read(min(_PIECE_BYTES, size - offset))
            if not piece:
                raise _Interrupted(f"the server has closed the connection at byte {offset} of {size} of {name}")
            await asyncio.to_thread(_write, file, piece, hashed)
            offset += len(piece)
    said = await connection.receive() or {}
    if said.get("sha256") != hashed.hexdigest():
        partial.unlink()
        raise _Interrupted(f"{name}: checksum mismatch")
    partial.rename(path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _write(file: IO[bytes], piece: bytes, hashed: "hashlib._Hash") -> None:
    hashed.update(piece)
    file.write(piece)


def _hash_beginning(file: IO[bytes], num_bytes: int) -> "hashlib._Hash":
    """Return the hash of a file's beginning, and leave the file behind that."""
    hashed = hashlib.sha256()
    for begin in range(0, num_bytes, _PIECE_BYTES):
        hashed.update(file.read(min(_PIECE_BYTES, num_bytes - begin)))
    return hashed


def _missing(files: Mapping[str, int], aside: Path) -> dict[str, int]:
    """Return the bytes that have not arrived of each file that is not whole."""
    there = {path.relative_to(aside).as_posix(): path.stat().st_size for path in aside.rglob("*") if path.is_file()}
    begun = {name: there.get(_partial(Path(name)).as_posix(), 0) for name in files.keys() - there.keys()}
    return {name: max(0, files[name] - num_bytes) for name, num_bytes in sorted(begun.items())}


def _require_room(name: str, num_bytes: int, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if num_bytes + _SPARE_BYTES > free:
        raise BackendFailed(
            f"{num_bytes / _GIB:.2f} GiB of model {name} are missing, and {directory.parent} has {free / _GIB:.2f} GiB"
            f" free, of which {_SPARE_BYTES / _GIB:.0f} stay: make room, or give another --data-dir"
        )


def _require_inside(name: str) -> str:
    """Return a file's name, which must stay within the directory. Raises BackendFailed."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BackendFailed(f"the server names a file {name!r} outside its model")
    return name


def _size(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
