"""Sampling sessions: the weights that sampling clients sample from. The latest are cached in memory.

Another owner's sampling session is treated as unknown.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Select, case, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.backends.lru import LRU
from tinker_server.errors import BadRequest, UnknownSampler
from tinker_server.store.database import Database
from tinker_server.store.directories import MAX_NAMES, claim, release
from tinker_server.store.records import SamplingSession, columns, held_bytes, record
from tinker_server.store.tables import SamplingSessionRow, SessionRow

CACHED_BYTES = 16 << 20
"""Bytes of cached records."""
WARNED = 10_000
"""Ids in memory of sampling sessions that were warned."""
IN_USE_S = 600.0
"""Weights are in use for so long after a sample: a training loop may sample from the last few of its steps."""
_PLAIN = {"synchronize_session": False}  # else the ORM evaluates conditions on every object it knows


@dataclass(frozen=True)
class UnnamedLimits:
    """Limits on the sampler weights without a name that are kept beside those in use."""

    kept_s: float
    """Seconds after they were last sampled from."""
    silent_s: float
    """Seconds after the last heartbeat of their session, and the last sample."""
    per_model: int
    """Number of a model's weights."""
    bytes_per_owner: int


_ROW = SamplingSessionRow
_USED = func.coalesce(_ROW.used_at, _ROW.created_at)
_USED_AT = func.max(_USED)
_HEARD = SessionRow.last_heartbeat
_ALIVE_AT = func.max(case((SessionRow.finished_at.is_not(None), 0.0), (_HEARD < _USED, _USED), else_=_HEARD))
"""A sample is a sign of life too: a client that works, by curl for example, may send no heartbeats."""
_UNNAMED = (
    select(_ROW.directory, func.min(_ROW.owner), func.max(func.coalesce(_ROW.size_bytes, 0)), _USED_AT)
    .join(SessionRow)
    .where(_ROW.directory.is_not(None), _ROW.model_path.is_(None), _ROW.weights_deleted_at.is_(None))
    .group_by(_ROW.directory)
)
"""Selects the weights without a name that exist, as `_Unnamed`."""


@dataclass(frozen=True)
class _Unnamed:
    directory: str
    owner: str
    size_bytes: int
    used_at: float

    @property
    def model(self) -> str:
        return self.directory.rpartition("/")[0]


class SamplerStore:
    """Reads and writes the sampling_sessions table."""

    def __init__(self, db: Database, cached_bytes: int = CACHED_BYTES) -> None:
        self._db = db
        self._cached: LRU[str, SamplingSession] = LRU(cached_bytes, held_bytes)
        self._used_at: dict[str, float] = {}
        """Times by sampling session, not written yet."""
        self._running: Counter[str] = Counter()
        self._changes = 0
        """Counts the changes of many rows at once."""
        self._warned: LRU[str, str] = LRU(WARNED)

    async def create(self, sampler: SamplingSession) -> str:
        """Store a sampling session and return its id; a repeat changes nothing.

        Raises BadRequest if the id is in use for other weights.
        """

        async def add(session: AsyncSession) -> SamplingSession:
            first = await session.get(SamplingSessionRow, sampler.sampling_session_id)
            if first is None:
                session.add(SamplingSessionRow(**columns(sampler)))
                await claim(session, sampler.directory if sampler.model_path is None else None)
                return sampler
            known = record(SamplingSession, first)
            if _weights_of(known) != _weights_of(sampler):
                raise BadRequest(
                    f"{sampler.sampling_session_id} was created before, for other weights; use another"
                    " sampling_session_seq_id"
                )
            return known

        self._cached.put(sampler.sampling_session_id, await self._db.change(add))
        return sampler.sampling_session_id

    async def repoint(self, folder: str, directory: str) -> set[str]:
        """Move sessions with weights in `folder` to `directory`, also those whose weights were deleted.

        Returns the directories that they left, now unreferenced.
        """
        row = SamplingSessionRow
        inside = row.directory.startswith(folder, autoescape=True) & (row.directory != directory)

        async def move(session: AsyncSession) -> set[str]:
            left = {
                directory
                for directory in await session.scalars(select(row.directory).where(inside))
                if directory is not None
            }
            change = update(row).where(inside).values(directory=directory, weights_deleted_at=None)
            await session.execute(change, execution_options=_PLAIN)
            await release(session, left)
            return left

        left = await self._db.change(move)
        self._changes += 1
        self._cached.keep(lambda cached: cached.directory is None or not cached.directory.startswith(folder))
        return left

    def warn_once(self, sampling_session_id: str) -> bool:
        """Return whether this is the session's first warning; a restarted server warns again."""
        is_first = self._warned.get(sampling_session_id) is None
        self._warned.put(sampling_session_id, sampling_session_id)
        return is_first

    async def require(self, sampling_session_id: str, owner: str) -> SamplingSession:
        """Return a sampling session of the owner. Raises UnknownSampler."""
        sampler = self._cached.get(sampling_session_id) or await self.get(sampling_session_id)
        if sampler.owner != owner:
            raise _unknown(sampling_session_id)
        return sampler

    async def get(self, sampling_session_id: str) -> SamplingSession:
        """Return a sampling session, whoever owns it. Raises UnknownSampler."""
        while (cached := self._cached.get(sampling_session_id)) is None:
            changes = self._changes
            row = await self._db.look(lambda session: session.get(SamplingSessionRow, sampling_session_id))
            if row is None:
                raise _unknown(sampling_session_id)
            if changes == self._changes:  # else the row may be outdated
                return self._cached.setdefault(sampling_session_id, record(SamplingSession, row))
        return cached

    @contextmanager
    def using(self, sampling_session_id: str) -> Iterator[None]:
        """Note that it is sampled from while the block runs."""
        self._running[sampling_session_id] += 1
        self._used_at[sampling_session_id] = time.time()
        try:
            yield
        finally:
            self._used_at[sampling_session_id] = time.time()
            self._running[sampling_session_id] -= 1
            if not self._running[sampling_session_id]:
                del self._running[sampling_session_id]

    async def save_uses(self) -> None:
        """Write the uses that were noted since the last call."""
        uses, self._used_at = self._used_at, {}
        if not uses:
            return
        row = SamplingSessionRow
        try:
            async with self._db.write() as session:
                for name, at in uses.items():
                    change = update(row).where(row.sampling_session_id == name).values(used_at=at)
                    await session.execute(change, execution_options=_PLAIN)
        except BaseException:
            self._used_at = uses | self._used_at
            raise

    async def take_unused(self, limits: UnnamedLimits, now: float) -> list[str]:
        """Take unnamed weights beyond the limits from their sessions; return their directories, now unreferenced.

        Sampling sessions of inflight weights share them: these stay while any of the sessions is used.
        """
        self._used_at |= dict.fromkeys(self._running, now)
        await self.save_uses()
        gone: list[str] = []
        used_at, alive_at = now - limits.kept_s > _USED_AT, now - limits.silent_s > _ALIVE_AT
        unused = _UNNAMED.having(or_(used_at, alive_at)).limit(MAX_NAMES)  # a part at a time: there may be thousands
        while found := await self._find_unnamed(unused):
            gone += await self._delete_weights([weights.directory for weights in found], now)
        excess = [weights.directory for weights in _excess(await self._find_unnamed(_UNNAMED), limits, now)]
        for start in range(0, len(excess), MAX_NAMES):
            gone += await self._delete_weights(excess[start : start + MAX_NAMES], now)
        return gone

    async def _find_unnamed(self, query: "Select[str | None, str, int, float]") -> list[_Unnamed]:
        async with self._db.read() as session:
            found = (await session.execute(query)).all()
        return [_Unnamed(name, owner, size, used_at) for name, owner, size, used_at in found if name is not None]

    async def _delete_weights(self, directories: list[str], now: float) -> list[str]:
        row = SamplingSessionRow
        change = update(row).where(row.directory.in_(directories), row.model_path.is_(None))
        async with self._db.write() as session:
            await session.execute(change.values(weights_deleted_at=now), execution_options=_PLAIN)
            await release(session, directories)
        self._changes += 1
        gone = set(directories)
        self._cached.keep(lambda cached: cached.directory not in gone)
        return directories


def _excess(unnamed: list[_Unnamed], limits: UnnamedLimits, now: float) -> Iterator[_Unnamed]:
    """Yield the weights beyond the limits that are not in use; those used last are kept."""
    of_model, of_owner = Counter[str](), Counter[str]()
    for weights in sorted(unnamed, key=lambda weights: weights.used_at, reverse=True):
        too_much = of_model[weights.model] >= limits.per_model or (
            of_owner[weights.owner] + weights.size_bytes > limits.bytes_per_owner
        )
        if too_much and weights.used_at < now - IN_USE_S:
            yield weights
        else:
            of_model[weights.model] += 1
            of_owner[weights.owner] += weights.size_bytes


def run_of_weights(model_path: str | None, directory: str | None) -> str:
    """Return the id of the run that saved the weights, by their path or directory; empty for a base model."""
    if model_path is not None:
        return model_path.removeprefix("tinker://").partition("/")[0]
    return "" if directory is None else directory.split("/")[1]


def _unknown(sampling_session_id: str) -> UnknownSampler:
    return UnknownSampler(f"no sampling session has the id {sampling_session_id!r}")


def _weights_of(sampler: SamplingSession) -> tuple[str, str | None]:
    """Return what identifies the weights: for named weights the name, although they may have been saved again since."""
    return sampler.base_model, sampler.model_path or sampler.directory
