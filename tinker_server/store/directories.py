"""Where saved weights lie on disk: `checkpoints/<run>/<kind>/<name>~<unique>` below the data directory.

A directory is written once, under a name that is never used again: a sampler may know the weights by it.
The database keeps directories relative, so that the data directory can be moved.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from backends.files import flush, written_aside
from tinker_server.errors import StartFailed

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


class Storage:
    """The directories of all checkpoints."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir.resolve()

    def fresh(self, run_id: str, kind: str, name: str) -> str:
        """A directory for new weights, not made yet, below the data directory.

        Raises ValueError for an id or name that could lead elsewhere.
        """
        for part in (run_id, kind, name):
            if _PART.fullmatch(part) is None:
                raise ValueError(f"{part!r} cannot be part of a directory")
        return f"checkpoints/{run_id}/{kind}/{name}~{uuid.uuid4().hex[:8]}"

    def path(self, directory: str) -> Path:
        return self._root / directory

    def holds(self, directory: str) -> bool:
        return self.path(directory).is_dir()

    async def size_bytes(self, directory: str) -> int:
        return await asyncio.to_thread(_size_bytes, self.path(directory))

    async def delete(self, directory: str) -> None:
        """Remove weights and what was packed of them. Raises ValueError for what is not below `checkpoints`."""
        path = self._below("checkpoints", directory)
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await asyncio.to_thread(self.archive_of(directory).unlink, missing_ok=True)

    async def copy(self, source: str, target: str) -> None:
        """Another directory of the same files, each on disk once (or copied, where the disk has no links).

        Deleting either leaves the other whole; neither is written again. Raises OSError where the source is gone.
        """
        await asyncio.to_thread(_link_tree, self.path(source), self.path(target))

    async def flush(self, directory: str) -> None:
        """Make what was written there durable."""
        await asyncio.to_thread(flush, self.path(directory))

    async def files(self, directory: str) -> list[str]:
        """Relative paths of the weights' files."""
        return await asyncio.to_thread(_files, self.path(directory))

    def downloadable(self, path: str) -> Path:
        """A file of weights. Raises ValueError for any other path, also for what a link leads to."""
        return self._below("checkpoints", path)

    def archive_of(self, directory: str) -> Path:
        """Where the packed form of a directory's weights is, if there is one."""
        return self._root / "archives" / f"{directory.replace('/', '.')}.tar.gz"

    def _below(self, top: str, path: str) -> Path:
        resolved = (self._root / path).resolve()
        if not resolved.is_relative_to(self._root / top) or resolved == self._root / top:
            raise ValueError(f"{path!r} is not below {top}")
        return resolved


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def _link_tree(source: Path, target: Path) -> None:
    with written_aside(target) as aside:
        shutil.copytree(source, aside, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links; if the file is gone, this fails too
        shutil.copy2(source, target)


@contextlib.contextmanager
def hold(data_dir: Path) -> Iterator[None]:
    """Make the data directory and keep other servers out of it. Raises StartFailed."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "lock").open("w")
    except OSError as error:
        raise StartFailed(f"the data directory {data_dir} cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartFailed(f"another server uses the data directory {data_dir}") from None
        yield
