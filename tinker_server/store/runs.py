"""Training runs. They are looked up at every operation, so the latest are cached in memory."""

from collections import Counter
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Select, Table, and_, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.backends.lru import LRU
from tinker_server.errors import BadRequest, ModelIdTaken, UnknownModel
from tinker_server.store.database import Database, delete_where
from tinker_server.store.directories import claim, release
from tinker_server.store.futures import replay_log
from tinker_server.store.records import Checkpoint, Snapshot, TrainingRun, columns, held_bytes, record
from tinker_server.store.tables import CheckpointRow, ClientMetricRow, Future, SessionRow, StepRow, TrainingRunRow

CACHED_BYTES = 32 << 20
"""Bytes of cached records."""


@dataclass(frozen=True)
class Labels:
    """A run's name, notes and tags, for people."""

    name: str
    notes: str
    tags: list[str]


class RunStore:
    """Reads and writes the training_runs table."""

    def __init__(self, db: Database, cached_bytes: int = CACHED_BYTES) -> None:
        self._db = db
        self._cached: LRU[str, TrainingRun] = LRU(cached_bytes, held_bytes)
        self._ended: set[str] = set()
        """Runs in memory that had ended at the last call of `forget_ended`."""

    async def add(self, run: TrainingRun, checkpoint: Checkpoint | None = None) -> None:
        """Store a run; for copied weights also their checkpoint, whose model is never in memory.

        Raises ModelIdTaken.
        """
        tried = False

        async def add(session: AsyncSession) -> None:
            nonlocal tried
            again, tried = tried, True
            first = await session.get(TrainingRunRow, run.model_id)
            if first is not None:
                if again and record(TrainingRun, first) == run:
                    return  # it was committed, but the answer was lost
                raise ModelIdTaken(
                    f"{run.model_id} is in use, for a model or for a copy of weights; take another model_seq_id"
                )
            session.add(TrainingRunRow(**columns(run)))
            if checkpoint is not None:
                session.add(CheckpointRow(**columns(checkpoint)))
                await claim(session, checkpoint.directory)

        await self._db.change(add)
        self._cached.put(run.model_id, run)

    async def require(self, model_id: str, owner: str) -> TrainingRun:
        """Return a run of the owner. Raises UnknownModel."""
        run = self._cached.get(model_id) or await self.get(model_id)
        if run.owner != owner:
            raise _unknown(model_id)
        return run

    async def get(self, model_id: str) -> TrainingRun:
        """Return a run, whoever owns it. Raises UnknownModel."""
        if (run := await self.find(model_id)) is None:
            raise _unknown(model_id)
        return run

    async def find(self, model_id: str) -> TrainingRun | None:
        """Return a run, whoever owns it; None if there is none."""
        if (cached := self._cached.get(model_id)) is not None:
            return cached
        row = await self._db.look(lambda session: session.get(TrainingRunRow, model_id))
        return None if row is None else self._cached.setdefault(model_id, record(TrainingRun, row))

    def forget_ended(self) -> None:
        """Remove runs from memory that had already ended at the last call: nobody reads their older records any
        more."""
        ended: set[str] = set()

        def stays(run: TrainingRun) -> bool:
            if run.status == "lost" and run.model_id not in self._ended:
                ended.add(run.model_id)
            return run.status != "lost" or run.model_id in ended

        self._cached.keep(stays)
        self._ended = ended

    async def delete_unanswered(self, model_ids: Set[str]) -> None:
        """Delete models whose create_model was not answered when their server ended: they will be made again."""
        async with self._db.write() as session:
            for model_id in model_ids:
                row = await session.get(TrainingRunRow, model_id)
                if row is not None:
                    await release(session, [row.snapshot] if row.snapshot else [])
                    await session.delete(row)
        self._cached.clear()

    async def mark_all_suspended(self) -> None:
        """Record that all models are on disk and none in memory, since the server has just started."""
        change = update(TrainingRunRow).where(TrainingRunRow.status == "active").values(status="suspended")
        async with self._db.write() as session:
            await session.execute(change)
        self._cached.clear()

    async def mark_lost(self, model_id: str) -> None:
        """Record that a model is neither in memory nor on disk. Its snapshot, if any, is released."""
        await self._set(
            model_id, lambda session: replay_log.truncate(session, model_id, None), status="lost", snapshot=None
        )

    async def set_snapshot(self, model_id: str, snapshot: Snapshot, computed_with: dict[str, str]) -> None:
        """Record a written snapshot of the model. The snapshot before is released."""

        async def truncate_log(session: AsyncSession) -> None:
            await replay_log.truncate(session, model_id, snapshot.position)
            await replay_log.clear_tries(session, model_id)

        changes = {"snapshot": snapshot.directory, "trainable": snapshot.trainable, "computed_with": computed_with}
        await self._set(model_id, truncate_log, **changes)

    async def mark_suspended(self, model_id: str) -> None:
        """Record that a model is on disk until its next operation."""
        await self._set(model_id, status="suspended")

    async def mark_active(self, model_id: str) -> None:
        """Record that a model is in memory again."""
        await self._set(model_id, status="active")

    async def set_labels(self, model_id: str, owner: str, labels: Labels) -> None:
        """Name and describe a run of the owner; empty labels remove what was there. Raises UnknownModel."""
        await self.require(model_id, owner)
        await self._set(model_id, name=labels.name or None, notes=labels.notes or None, tags=labels.tags or None)

    async def set_archived(self, model_id: str, owner: str, at: float | None) -> None:
        """Archive a run of the owner; None: list it again. Raises UnknownModel."""
        await self.require(model_id, owner)
        await self._set(model_id, archived_at=at)

    async def delete(self, model_id: str, owner: str) -> None:
        """Delete a run that has ended, then its steps and metrics. Its checkpoints are others' to delete.

        What an interruption leaves of the steps and metrics expires. Raises UnknownModel, or BadRequest for a run that
        has not ended.
        """
        await self.require(model_id, owner)
        async with self._db.write() as session:
            row = await session.get(TrainingRunRow, model_id)
            if row is None:
                raise _unknown(model_id)
            if row.status != "lost":
                raise BadRequest(f"the run {model_id} has not ended: it is {row.status}")
            await session.delete(row)
        self._cached.pop(model_id)
        for kind in (StepRow, ClientMetricRow):
            await delete_where(self._db, cast(Table, kind.__table__), kind.model_id == model_id)

    async def _set(
        self, model_id: str, also: Callable[[AsyncSession], Awaitable[None]] | None = None, **values: object
    ) -> None:
        """Change the row, then the cache, never the other way round. `also` runs in the same transaction."""

        async def change(session: AsyncSession) -> TrainingRun:
            row = await session.get(TrainingRunRow, model_id)
            if row is None:
                raise _unknown(model_id)
            left = row.snapshot
            for name, value in values.items():
                setattr(row, name, value)
            await claim(session, row.snapshot)
            if left is not None and left != row.snapshot:
                await release(session, [left])
            if also is not None:
                await also(session)
            return record(TrainingRun, row)

        try:
            run = await self._db.change(change)
        except BaseException:
            self._cached.pop(model_id)  # it may have been committed all the same
            raise
        self._cached.put(model_id, run)

    async def are_in(self, session_id: str) -> bool:
        """Return whether a session has models."""
        query = select(TrainingRunRow.model_id).where(TrainingRunRow.session_id == session_id).limit(1)
        return await self._db.look(lambda session: session.scalar(query)) is not None

    async def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of runs by owner and status."""
        query = select(TrainingRunRow.owner, TrainingRunRow.status, func.count())
        async with self._db.read() as session:
            rows = await session.execute(query.group_by(TrainingRunRow.owner, TrainingRunRow.status))
            return Counter({(owner, status): count for owner, status, count in rows})

    async def page(self, owner: str | None, limit: int, offset: int) -> tuple[list[TrainingRun], int]:
        """Return a page of an owner's runs, newest first, and their number. None, for administrators alone: of all
        owners' runs."""
        query = select(TrainingRunRow)
        if owner is not None:
            query = query.where(TrainingRunRow.owner == owner)
        newest = query.order_by(TrainingRunRow.created_at.desc(), TrainingRunRow.model_id.desc())
        async with self._db.read() as session:
            total = await session.scalar(select(func.count()).select_from(query.subquery()))
        return await self._find_all(newest.limit(limit).offset(offset)), total or 0

    async def find_active(self) -> list[TrainingRun]:
        """Return the models that are neither lost nor suspended."""
        return await self._find_all(select(TrainingRunRow).where(TrainingRunRow.status == "active"))

    async def find_suspended(self, heartbeat: float) -> list[TrainingRun]:
        """Return the models on disk whose session is finished, or had its last heartbeat before this time. So had they
        their last request: a client that works, by curl for example, may send no heartbeats."""
        worked = exists().where(Future.lane == TrainingRunRow.model_id, Future.created_at >= heartbeat)
        over = or_(SessionRow.finished_at.is_not(None), and_(SessionRow.last_heartbeat < heartbeat, ~worked))
        return await self._find_all(
            select(TrainingRunRow).join(SessionRow).where(TrainingRunRow.status == "suspended", over)
        )

    async def _find_all(self, query: Select[TrainingRunRow]) -> list[TrainingRun]:
        async with self._db.read() as session:
            return [record(TrainingRun, row) for row in await session.scalars(query)]


def _unknown(model_id: str) -> UnknownModel:
    return UnknownModel(f"no model has the id {model_id!r}")
