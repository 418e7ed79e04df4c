"""Where saved weights lie on disk: `checkpoints/<run>/<kind>/<name>~<unique>` below the data directory.

A directory is written once, under a name that is never used again: a sampler may know the weights by it.
The database keeps directories relative, so that the data directory can be moved. It lists those that no row owns
(`loose.py`), so that whatever fails or crashes, they are deleted in the end.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.files import flush, make_directory, written_aside
from tinker_server.errors import DatabaseUnavailable, StartFailed
from tinker_server.store import loose
from tinker_server.store.database import Database

log = logging.getLogger(__name__)
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
LOOSE_KEPT_S = 600.0
"""A sample that has begun may still read weights that were given up."""


class Storage:
    """The directories of all checkpoints."""

    def __init__(self, data_dir: Path, db: Database) -> None:
        self._root = data_dir.resolve()
        self._db = db
        self._writing: set[str] = set()

    async def reserve(self, run_id: str, kind: str, name: str) -> str:
        """A directory for new weights, not made yet, below the data directory; loose until a row owns it.

        Raises ValueError for an id or name that could lead elsewhere, DatabaseUnavailable.
        """
        for part in (run_id, kind, name):
            if _PART.fullmatch(part) is None:
                raise ValueError(f"{part!r} cannot be part of a directory")
        directory = f"checkpoints/{run_id}/{kind}/{name}~{uuid.uuid4().hex[:8]}"
        await self._db.change(lambda session: loose.let_go(session, [directory]))
        return directory

    @asynccontextmanager
    async def writing(self, run_id: str, kind: str, name: str) -> AsyncIterator[str]:
        """A reserved directory, which a row must own when the block ends. It is deleted where the block raises."""
        directory = await self.reserve(run_id, kind, name)
        self._writing.add(directory)
        try:
            yield directory
        except DatabaseUnavailable:
            raise  # perhaps a row owns it all the same; if none does, it is loose
        except BaseException:
            await self.delete(directory)
            raise
        finally:
            self._writing.discard(directory)

    @property
    def is_superseded(self) -> bool:
        """Whether another server has the database now."""
        return self._db.is_superseded

    def require_lease(self) -> None:
        """Raises Superseded where another server has the database, and so the directories."""
        self._db.require_lease()

    def path(self, directory: str) -> Path:
        """Where a directory is on this machine."""
        return self._root / directory

    def holds(self, directory: str) -> bool:
        """Whether the directory is there, and so whole."""
        return self.path(directory).is_dir()

    async def size_bytes(self, directory: str) -> int:
        """Of all its files."""
        return await asyncio.to_thread(_size_bytes, self.path(directory))

    async def delete(self, *directories: str) -> None:
        """Remove weights and what was packed of them. Raises ValueError for what is not below `checkpoints`,
        Superseded."""
        self.require_lease()
        paths = [(self._below("checkpoints", directory), self.archive_of(directory)) for directory in directories]
        await asyncio.to_thread(_remove, paths)
        gone = [directory for directory in directories if not self.path(directory).exists()]
        with contextlib.suppress(DatabaseUnavailable):  # they are noted still, and looked for again
            async with self._db.write() as session:
                await loose.forget(session, gone)

    async def delete_loose(self, kept_s: float = LOOSE_KEPT_S) -> None:
        """Remove what no row has owned for so long and nobody is writing."""
        async with self._db.write() as session:  # the next server's directories are not this one's to delete
            directories = await loose.noted(session, before=time.time() - kept_s)
        if unowned := [directory for directory in directories if directory not in self._writing]:
            log.info("deleting %d directories of weights that nothing refers to", len(unowned))
            await self.delete(*unowned)

    async def delete_loose_of(self, folder: str, kept: Iterable[str]) -> None:
        """Remove what no row owns in a folder, apart from `kept`."""
        async with self._db.write() as session:
            directories = await loose.noted(session, folder)
        await self.delete(*set(directories).difference(kept, self._writing))

    async def delete_half_written(self) -> None:
        """Remove what an earlier server began to write. No server may be writing."""
        await asyncio.to_thread(_remove_asides, self._root)
        await self.delete_loose(0)

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


def _remove(paths: list[tuple[Path, Path]]) -> None:
    for directory, archive in paths:
        shutil.rmtree(directory, ignore_errors=True)
        archive.unlink(missing_ok=True)


def _remove_asides(root: Path) -> None:
    for aside in (*root.glob("checkpoints/*/*/.*"), *root.glob("archives/.*")):
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def _link_tree(source: Path, target: Path) -> None:
    with written_aside(target) as aside:
        shutil.copytree(source, aside, copy_function=link)


def link(source: str, target: str) -> None:
    """The same file under another name. Raises OSError where it is gone."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links; if the file is gone, this fails too
        shutil.copy2(source, target)


@contextlib.contextmanager
def hold(data_dir: Path) -> Iterator[None]:
    """Make the data directory, for this user alone, and keep other servers out of it. Raises StartFailed."""
    try:
        make_directory(data_dir, 0o700)
        data_dir.chmod(0o700)
        lock = (data_dir / "lock").open("w")
    except OSError as error:
        raise StartFailed(f"the data directory {data_dir} cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartFailed(f"another server uses the data directory {data_dir}") from None
        yield
