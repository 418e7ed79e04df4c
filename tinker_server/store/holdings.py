"""Limits on what an owner holds: models, and bytes of the disk that has the data directory.

Bytes are those of saved weights with and without a name, of snapshots, and of archives. Hard links count whole.
Snapshots are never refused, since models are restored by them.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from shutil import disk_usage

from sqlalchemy import func, select

from backends.lru import LRU
from tinker_server.errors import LimitReached
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
from tinker_server.store.tables import CheckpointRow, SamplingSessionRow, TrainingRunRow

GIB = 1 << 30
MEASURED = 10_000
"""Snapshots whose sizes are kept in memory. A directory never changes."""


class Holdings:
    """Counts what rows and directories say, and what is being made and has no row yet."""

    def __init__(self, db: Database, storage: Storage, max_models: int, disk_part: float) -> None:
        self._db = db
        self._storage = storage
        self._max_models = max_models
        self._disk_part = disk_part
        self._measured: LRU[str, int] = LRU(MEASURED)
        self._models: defaultdict[str, set[str]] = defaultdict(set)
        """By owner, models that are being made."""
        self._weights: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By owner, bytes of directories that are written and have no row yet."""

    @asynccontextmanager
    async def model(self, owner: str, model_id: str) -> AsyncIterator[None]:
        """Count a model that is stored when the block ends. Raises LimitReached."""
        making = self._models[owner]
        making.add(model_id)
        try:
            kept = select(TrainingRunRow.model_id).where(TrainingRunRow.owner == owner, TrainingRunRow.status != "lost")
            async with self._db.read() as session:
                stored = set(await session.scalars(kept))
            count = len((stored | making) - {model_id})
            if count >= self._max_models:
                raise LimitReached(
                    f"{count} models of {owner} are in memory or on disk; {self._max_models} are allowed: unload some,"
                    " or finish their sessions"
                )
            yield
        finally:
            making.discard(model_id)

    @asynccontextmanager
    async def weights(self, owner: str, directory: str, replaced: str | None = None) -> AsyncIterator[int]:
        """Count a written directory, which has a row when the block ends, and yield its bytes; `replaced` will go.

        Raises LimitReached.
        """
        size_bytes = self._weights[owner][directory] = await self._storage.size_bytes(directory)
        try:
            await self.require_room(owner, replaced=replaced)
            yield size_bytes
        finally:
            del self._weights[owner][directory]

    async def require_room(self, owner: str, more_bytes: int = 0, replaced: str | None = None) -> None:
        """Raise LimitReached unless the owner may hold so many bytes more once the directory `replaced` is gone.

        An owner may hold a part of what it holds and what is free. However full the disk is, others have the rest.
        """
        sizes = await self._sizes(owner)
        archives, free_bytes = await asyncio.to_thread(self._archives_and_free, sizes)
        for name, size_bytes in archives.items():
            sizes[name] += size_bytes
        available = sum(sizes.values()) + free_bytes
        held, allowed = sum(sizes.values()) - sizes.get(replaced or "", 0) + more_bytes, self._disk_part * available
        if held > allowed:
            raise LimitReached(
                f"saved weights, snapshots and archives of {owner} would take {held / GIB:.3f} GiB;"
                f" {allowed / GIB:.3f} GiB are allowed, {self._disk_part:.0%} of what they take and what is free:"
                " delete some, or unload models"
            )

    async def _sizes(self, owner: str) -> dict[str, int]:
        """Return the bytes of the owner's directories, without archives."""
        run, named, unnamed = TrainingRunRow, CheckpointRow, SamplingSessionRow
        has_no_name = (unnamed.directory.is_not(None), unnamed.model_path.is_(None))
        async with self._db.read() as session:
            weights = [
                *await session.execute(select(named.directory, named.size_bytes).where(named.owner == owner)),
                *await session.execute(
                    select(unnamed.directory, func.max(func.coalesce(unnamed.size_bytes, 0)))
                    .where(unnamed.owner == owner, unnamed.weights_deleted_at.is_(None), *has_no_name)
                    .group_by(unnamed.directory)
                ),
            ]
            snapshots = await session.scalars(
                select(run.snapshot).where(run.owner == owner, run.snapshot.is_not(None), run.status != "lost")
            )
            of_models = [directory for directory in snapshots if directory is not None]
        sizes = {directory: size_bytes for directory, size_bytes in weights} | self._weights[owner]
        for directory in of_models:
            sizes[directory] = await self._snapshot_bytes(directory)
        return sizes

    async def _snapshot_bytes(self, directory: str) -> int:
        size_bytes = self._measured.get(directory)
        if size_bytes is None:
            try:
                size_bytes = await self._storage.size_bytes(directory)
            except OSError:
                return 0  # a newer one has just taken its place
            self._measured.put(directory, size_bytes)
        return size_bytes

    def _archives_and_free(self, directories: Iterable[str]) -> tuple[dict[str, int], int]:
        """Return the bytes of those archives that there are, and the bytes that are free on the disk."""
        found = self._storage.archive_bytes()
        names = {self._storage.archive_of(directory).name: directory for directory in directories} if found else {}
        sizes = {names[name]: size_bytes for name, size_bytes in found.items() if name in names}
        return sizes, disk_usage(self._storage.path("")).free
