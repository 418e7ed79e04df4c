"""The directories of saved weights: `checkpoints/<run>/<kind>/<name>~<unique>` below the data directory.

A directory is written once, under a name that is never used again: a sampler may know the weights by it.
The database keeps directories relative, so that the data directory can be moved.

It also lists the directories that no row references: those that are being written, and those that were given up. A
directory is listed before it is made. The transaction that stores a row with it claims it, and the transaction that
removes the row releases it. So whatever a crash interrupts, the next server knows what to delete.
"""

import asyncio
import contextlib
import glob
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sqlalchemy import ColumnElement, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.backends.files import flush, make_private_directory, write_aside
from tinker_server.errors import DatabaseUnavailable, start_failure
from tinker_server.store.database import Database
from tinker_server.store.lease import lock_file
from tinker_server.store.tables import UnreferencedDirectory

log = logging.getLogger(__name__)
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
UNREFERENCED_KEPT_S = 600.0
"""A sample that has begun may still read weights that were given up."""
ARCHIVE_SUFFIX = ".tar.gz"
_CLOCK_NS = 2_000_000_000
"""Two changes of a folder may have the same time if they are no further apart: file systems count seconds or ticks."""
MAX_NAMES = 500
"""Directories in a statement: databases limit its parameters."""


async def claim(session: AsyncSession, directory: str | None) -> None:
    """Within a transaction, record that a row references the directory."""
    await session.execute(delete(UnreferencedDirectory).where(UnreferencedDirectory.directory == directory))


async def release(session: AsyncSession, directories: Iterable[str]) -> None:
    """Within a transaction, record that no row references the directories. Those that are listed already stay so."""
    for batch in batches(directories):
        listed = select(UnreferencedDirectory.directory).where(UnreferencedDirectory.directory.in_(batch))
        new = set(batch) - set(await session.scalars(listed))
        if new:
            rows = [{"directory": directory, "since": time.time()} for directory in new]
            await session.execute(insert(UnreferencedDirectory), rows)


class Storage:
    """The directories of all saved weights."""

    def __init__(self, data_dir: Path, db: Database) -> None:
        self._root = data_dir.resolve()
        self._archives: tuple[int, dict[str, int]] = (0, {})
        """The time at which the folder of archives changed last, when it was read, and what was in it."""
        self.lease = db.lease
        """The right to change the directories: another server that has the database has them too."""
        self._db = db
        self._writing: set[str] = set()

    async def reserve(self, run_id: str, kind: str, name: str) -> str:
        """Return a directory for new weights, not made yet, relative to the data directory. It is unreferenced.

        Raises ValueError for an id or name that could lead elsewhere, DatabaseUnavailable.
        """
        for part in (run_id, kind, name):
            if _PART.fullmatch(part) is None:
                raise ValueError(f"{part!r} cannot be part of a directory")
        directory = f"checkpoints/{run_id}/{kind}/{name}~{uuid.uuid4().hex[:8]}"
        await self._db.change(lambda session: release(session, [directory]))
        return directory

    @asynccontextmanager
    async def writing(self, run_id: str, kind: str, name: str) -> AsyncIterator[str]:
        """Reserve a directory, which a row must reference when the block ends. It is deleted if the block raises."""
        directory = await self.reserve(run_id, kind, name)
        with self.protect(directory):
            try:
                yield directory
            except (DatabaseUnavailable, asyncio.CancelledError):
                raise  # a row may reference it all the same; if none does, it is listed as unreferenced
            except BaseException:
                await self.delete(directory)
                raise

    @contextmanager
    def protect(self, directory: str) -> Iterator[None]:
        """Keep a directory that no row references yet from being deleted as unreferenced."""
        self._writing.add(directory)
        try:
            yield
        finally:
            self._writing.discard(directory)

    def path(self, directory: str) -> Path:
        """Return the path of a directory on this machine."""
        return self._root / directory

    def holds(self, directory: str) -> bool:
        """Return whether the directory is there, and so whole."""
        return self.path(directory).is_dir()

    async def size_bytes(self, directory: str) -> int:
        """Return the bytes of all its files."""
        return await asyncio.to_thread(_size_bytes, self.path(directory))

    async def delete(self, *directories: str) -> None:
        """Delete weights and their archives. Raises Superseded, and ValueError for a path not below `checkpoints`."""
        self.lease.require()
        paths = [(self.below_checkpoints(directory), self.archive_of(directory)) for directory in directories]
        await asyncio.to_thread(_remove, paths)
        gone = [directory for directory in directories if not self.path(directory).exists()]
        with contextlib.suppress(DatabaseUnavailable):  # they stay listed, and are deleted later
            async with self._db.write() as session:
                for batch in batches(gone):
                    listed = UnreferencedDirectory.directory.in_(batch)
                    await session.execute(delete(UnreferencedDirectory).where(listed))

    async def delete_unreferenced(self, until: float) -> None:
        """Delete the directories that no row has referenced since this time, in Unix seconds, and nobody is writing."""
        if unreferenced := await self._find_unreferenced(UnreferencedDirectory.since <= until):
            log.info("deleting %d directories of weights that nothing refers to", len(unreferenced))
            await self.delete(*unreferenced)

    async def delete_unreferenced_in(self, folder: str, kept: Iterable[str]) -> None:
        """Delete the directories in a folder that no row references, apart from `kept`."""
        inside = UnreferencedDirectory.directory.startswith(folder, autoescape=True)
        await self.delete(*(await self._find_unreferenced(inside)).difference(kept))

    async def _find_unreferenced(self, condition: ColumnElement[bool]) -> set[str]:
        """Return the directories that no row references and nobody is writing."""
        before = set(self._writing)  # what is recorded during the query may be in its answer, and is kept no longer
        async with self._db.write() as session:  # the next server's directories are not this server's to delete
            found = await session.scalars(select(UnreferencedDirectory.directory).where(condition))
            return set(found) - before - self._writing

    async def delete_half_written(self) -> None:
        """Delete everything that an earlier server had begun to write. No server may be writing."""
        await asyncio.to_thread(_remove_asides, self._root)
        await self.delete_unreferenced(math.inf)  # whatever the clock says by now

    async def copy(self, source: str, target: str) -> None:
        """Make another directory of the same files, as hard links or, if the disk has none, as copies.

        Deleting either leaves the other whole; neither is written again. Raises OSError if the source is gone.
        """
        await asyncio.to_thread(_link_tree, self.path(source), self.path(target))

    async def flush(self, directory: str) -> None:
        """Make the directory's files durable."""
        await asyncio.to_thread(flush, self.path(directory))

    async def files(self, directory: str) -> list[str]:
        """Return the relative paths of the weights' files."""
        return await asyncio.to_thread(_files, self.path(directory))

    def archive_of(self, directory: str) -> Path:
        """Return the path of a directory's archive, if any."""
        return self._root / "archives" / f"{directory.replace('/', '.')}{ARCHIVE_SUFFIX}"

    def archive_bytes(self) -> dict[str, int]:
        """Return the sizes of all archives by their file's name, those being written apart. Reads the folder only if a
        file has come or gone since: an archive itself never changes."""
        folder, now_ns = self._root / "archives", time.time_ns()
        try:
            changed_ns = folder.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        known_ns, sizes = self._archives
        if changed_ns != known_ns:
            with os.scandir(folder) as files:
                sizes = {file.name: file.stat().st_size for file in files if not file.name.startswith(".")}
            if now_ns - changed_ns > _CLOCK_NS:
                self._archives = changed_ns, sizes
        return sizes

    async def delete_archives(self, before: float) -> None:
        """Delete the archives that were packed before this time; who asks again gets a new directory. Raises
        Superseded."""
        self.lease.require()
        await asyncio.to_thread(_remove_files, self._root / "archives", before)

    def below_checkpoints(self, path: str) -> Path:
        """Return the path of weights or of a file of them. Raises ValueError for any other path, also behind a link."""
        resolved, top = (self._root / path).resolve(), self._root / "checkpoints"
        if not resolved.is_relative_to(top) or resolved == top:
            raise ValueError(f"{path!r} is not below checkpoints")
        return resolved


def batches(directories: Iterable[str]) -> list[list[str]]:
    """Split names into lists that a statement takes."""
    all_ = sorted(set(directories))
    return [all_[start : start + MAX_NAMES] for start in range(0, len(all_), MAX_NAMES)]


def _remove(paths: list[tuple[Path, Path]]) -> None:
    for directory, archive in paths:
        # What a process that died in the middle of it has written is beside it.
        for path in (directory, *directory.parent.glob(f".{glob.escape(directory.name)}.*")):
            shutil.rmtree(path, ignore_errors=True)
        archive.unlink(missing_ok=True)
        _remove_empty(directory.parent, directory.parent.parent)


def _remove_files(folder: Path, before: float) -> None:
    """Remove the files of a folder that were written before, but not those that are being written."""
    for file in folder.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):  # its weights were deleted meanwhile
            if file.stat().st_mtime < before:
                # A server before 1.1 that was killed while it packed has left a directory.
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _remove_empty(*folders: Path) -> None:
    """Remove folders that are empty. What is written to them next makes them again."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove_asides(root: Path) -> None:
    for aside in (*root.glob("checkpoints/*/*/.*"), *root.glob("archives/.*")):
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
    _remove_empty(*root.glob("checkpoints/*/*"), *root.glob("checkpoints/*"))


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def _link_tree(source: Path, target: Path) -> None:
    with write_aside(target) as aside:
        shutil.copytree(source, aside, copy_function=link)


def link(source: str, target: str) -> None:
    """Make the same file under another name. Raises OSError if it is gone."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links; if the file is gone, this fails too
        shutil.copy2(source, target)


@contextlib.contextmanager
def hold(data_dir: Path) -> Iterator[None]:
    """Make the data directory, for this user alone, and keep other servers out of it. Raises StartFailed."""
    what = f"the data directory {data_dir}"
    try:
        make_private_directory(data_dir)
    except OSError as error:
        raise start_failure(f"{what} cannot be used: {error.strerror}", error) from None
    with lock_file(data_dir / "lock", what):
        yield
