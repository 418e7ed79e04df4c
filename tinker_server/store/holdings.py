"""Limits on what an owner holds: models, and bytes of the disk that has the data directory.

A single account has all bytes of an owner: of saved weights with and without a name, snapshots, archives, and of what
other stores count: uploads, bodies, results, client metrics, samples. Hard links count whole. Snapshots are never
refused, since models are restored by them.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from shutil import disk_usage

from sqlalchemy import String, func, select

from tinker_server.backends.lru import LRU
from tinker_server.errors import DiskFull, LimitReached
from tinker_server.store.database import Database
from tinker_server.store.directories import ARCHIVE_SUFFIX, Storage, batches
from tinker_server.store.tables import CheckpointRow, SamplingSessionRow, TrainingRunRow

GIB = 1 << 30
Count = Callable[[str], Awaitable[int]]
"""Returns the bytes that a store has of an owner."""
MEASURED = 10_000
"""Snapshots whose sizes are kept in memory. A directory never changes."""


@dataclass(frozen=True)
class Part:
    """What an owner holds of the disk, and may hold: a part of that and what is free. However full the disk is, others
    have the rest."""

    held_bytes: int
    free_bytes: int
    disk_part: float

    @property
    def allowed_bytes(self) -> float:
        """Return the bytes that the owner may hold."""
        return self.disk_part * (self.held_bytes + self.free_bytes)

    def has_room(self, more_bytes: int = 0) -> bool:
        """Return whether the owner may hold so many bytes more."""
        return self.held_bytes + more_bytes <= self.allowed_bytes

    def excess_bytes(self, more_bytes: int) -> float:
        """Return the bytes to delete until there is room: what is deleted lowers what is allowed."""
        return (self.held_bytes + more_bytes - self.allowed_bytes) / (1 - self.disk_part)

    def describe(self, owner: str, more_bytes: int) -> str:
        """Return the numbers of a refusal."""
        return (
            f"weights, snapshots, archives, uploads, requests, results, metrics and samples of {owner} would take"
            f" {(self.held_bytes + more_bytes) / GIB:.3f} GiB; {self.allowed_bytes / GIB:.3f} GiB are allowed,"
            f" {self.disk_part:.0%} of what they take and what is free"
        )


class Holdings:
    """Counts stored models and bytes, and those still being written."""

    def __init__(
        self, db: Database, storage: Storage, max_models: int, disk_part: float, counts: Collection[Count] = ()
    ) -> None:
        """`counts`: the bytes that are no directories of weights."""
        self._counts = counts
        self._db = db
        self._storage = storage
        self._max_models = max_models
        self._disk_part = disk_part
        self.asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By owner, held from `require_room` for bytes to come until they are there: else others would get the same
        room."""
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

        Raises DiskFull where the owner holds little, but the disk has no room.
        """
        part, freed = await self._part(owner, replaced)
        more_bytes -= freed
        if part.has_room(more_bytes):
            return
        if part.has_room() and more_bytes > part.free_bytes:
            raise DiskFull(
                f"the server's disk has {part.free_bytes} bytes left, and {more_bytes} are needed; try again once there"
                " is room"
            )
        raise LimitReached(f"{part.describe(owner, more_bytes)}: delete some, or unload models")

    async def part(self, owner: str) -> Part:
        """Return what an owner holds of the disk, and may hold."""
        part, _ = await self._part(owner, None)
        return part

    async def _part(self, owner: str, replaced: str | None) -> tuple[Part, int]:
        archives, free_bytes = await asyncio.to_thread(self._archives_and_free)
        held, freed = await self._count_bytes(owner, replaced, archives)
        held += sum([await count(owner) for count in self._counts])
        return Part(held, free_bytes, self._disk_part), freed

    async def _count_bytes(self, owner: str, replaced: str | None, archives: Mapping[str, int]) -> tuple[int, int]:
        """Return the bytes of an owner's directories, and those of `replaced` with its archive among them.

        The database adds up what may be many rows.
        """
        run, named, unnamed = TrainingRunRow, CheckpointRow, SamplingSessionRow
        written = dict(self._weights[owner])
        versions = (
            select(func.max(func.coalesce(unnamed.size_bytes, 0)).label("size_bytes"))
            .where(unnamed.owner == owner, unnamed.weights_deleted_at.is_(None), unnamed.model_path.is_(None))
            .where(unnamed.directory.is_not(None), unnamed.directory.not_in(written))
            .group_by(unnamed.directory)
            .subquery()
        )
        sums = (
            select(func.sum(named.size_bytes)).where(named.owner == owner, named.directory.not_in(written)),
            select(func.sum(versions.c.size_bytes)),
        )
        snapshots = select(run.snapshot).where(run.owner == owner, run.snapshot.is_not(None), run.status != "lost")
        archive = func.replace(named.directory, "/", ".", type_=String) + ARCHIVE_SUFFIX
        freed = select(named.size_bytes).where(named.owner == owner, named.directory == replaced)
        async with self._db.read() as session:
            held = [int(await session.scalar(query) or 0) for query in sums]
            for batch in batches(archives):
                of_owner = select(archive).where(named.owner == owner, archive.in_(batch))
                held += [archives[name] for name in await session.scalars(of_owner)]
            of_models = [directory for directory in await session.scalars(snapshots) if directory is not None]
            freed_bytes = await session.scalar(freed) or 0
        if replaced is not None:
            freed_bytes += archives.get(self._storage.archive_of(replaced).name, 0)
        held += [*written.values(), *[await self._snapshot_bytes(directory) for directory in of_models]]
        return sum(held), freed_bytes

    async def _snapshot_bytes(self, directory: str) -> int:
        """Return the bytes of a snapshot's directory, which are measured once, as its files never change."""
        size_bytes = self._measured.get(directory)
        if size_bytes is None:
            try:
                size_bytes = await self._storage.size_bytes(directory)
            except OSError:
                return 0  # a newer directory has just taken its place
            self._measured.put(directory, size_bytes)
        return size_bytes

    def _archives_and_free(self) -> tuple[dict[str, int], int]:
        """Return the bytes of all archives by their file's name, and the bytes that are free on the disk."""
        return self._storage.archive_bytes(), disk_usage(self._storage.path("")).free
