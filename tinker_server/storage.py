"""Where saved weights lie on disk: `checkpoints/<run>/<kind>/<name>~<unique>` below the data directory.

A directory is written once, under a name that is never used again: a sampler may know the weights by it.
The database keeps directories relative, so that the data directory can be moved.
"""

import asyncio
import contextlib
import fcntl
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

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
        await asyncio.to_thread(shutil.rmtree, self.path(directory), ignore_errors=True)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


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
