"""Training runs. They are asked for at every operation, so the latest are kept in memory."""

from collections.abc import Awaitable, Callable, Set
from typing import Any

from sqlalchemy import Select, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from backends.lru import LRU
from tinker_server.errors import ModelIdTaken, UnknownModel
from tinker_server.store import loose
from tinker_server.store.database import Database
from tinker_server.store.futures import replay_log
from tinker_server.store.records import Checkpoint, TrainingRun, columns, held_bytes, record
from tinker_server.store.tables import CheckpointRow, SessionRow, TrainingRunRow

KEPT_BYTES = 32 << 20
"""Of records in memory."""


class RunStore:
    """The only way to the training_runs table."""

    def __init__(self, db: Database, kept_bytes: int = KEPT_BYTES) -> None:
        self._db = db
        self._known: LRU[str, TrainingRun] = LRU(kept_bytes, held_bytes)

    async def add(self, run: TrainingRun, checkpoint: Checkpoint | None = None) -> None:
        """Store a run, with the weights that were copied to it if it is a copy's, which is never in memory.

        Raises ModelIdTaken.
        """
        tried = False

        async def add(session: AsyncSession) -> None:
            nonlocal tried
            again, tried = tried, True
            first = await session.get(TrainingRunRow, run.model_id)
            if first is not None:
                if again and record(TrainingRun, first) == run:
                    return  # it was committed, although the answer was lost
                raise ModelIdTaken(
                    f"{run.model_id} is in use, for a model or for a copy of weights; take another model_seq_id"
                )
            session.add(TrainingRunRow(**columns(run)))
            if checkpoint is not None:
                session.add(CheckpointRow(**columns(checkpoint)))
                await loose.own(session, checkpoint.directory)

        await self._db.change(add)
        self._known.put(run.model_id, run)

    async def require(self, model_id: str, owner: str) -> TrainingRun:
        """Raises UnknownModel, also for another owner's."""
        run = await self.get(model_id)
        if run.owner != owner:
            raise _unknown(model_id)
        return run

    async def get(self, model_id: str) -> TrainingRun:
        """Whoever owns it. Raises UnknownModel."""
        if (run := await self.find(model_id)) is None:
            raise _unknown(model_id)
        return run

    async def find(self, model_id: str) -> TrainingRun | None:
        """Whoever owns it."""
        if (known := self._known.get(model_id)) is not None:
            return known
        row = await self._db.look(lambda session: session.get(TrainingRunRow, model_id))
        return None if row is None else self._known.setdefault(model_id, record(TrainingRun, row))

    async def forget_unanswered(self, model_ids: Set[str]) -> None:
        """Models whose creation nobody was told of, when the server that made them ended: they will be made again."""
        async with self._db.write() as session:
            for model_id in model_ids:
                row = await session.get(TrainingRunRow, model_id)
                if row is not None:
                    await loose.let_go(session, [row.snapshot] if row.snapshot else [])
                    await session.delete(row)
        self._known.clear()

    async def mark_all_suspended(self) -> None:
        """Record that no model is in memory, for a server has just started: all are on disk."""
        change = update(TrainingRunRow).where(TrainingRunRow.status == "active").values(status="suspended")
        async with self._db.write() as session:
            await session.execute(change)
        self._known.clear()

    async def mark_lost(self, model_id: str) -> None:
        """Record that a model is no longer in memory, and not on disk either. Its snapshot, if any, is loose."""

        async def end_log(session: AsyncSession) -> None:
            await replay_log.truncate(session, model_id, None)

        await self._set(model_id, end_log, status="lost", snapshot=None)

    async def set_snapshot(self, model_id: str, snapshot: str, position: int, computed_with: dict[str, Any]) -> None:
        """Record a snapshot that is there, of the model as it was at a position of its log. The one before is loose."""

        async def shorten_log(session: AsyncSession) -> None:
            await replay_log.truncate(session, model_id, position)

        await self._set(model_id, shorten_log, snapshot=snapshot, computed_with=computed_with)

    async def mark_suspended(self, model_id: str) -> None:
        """Record that a model is on disk until its next operation."""
        await self._set(model_id, status="suspended")

    async def mark_active(self, model_id: str) -> None:
        """Record that a model is in memory again."""
        await self._set(model_id, status="active")

    async def _set(
        self, model_id: str, also: Callable[[AsyncSession], Awaitable[None]] | None = None, **values: object
    ) -> None:
        """Memory follows the database, never the other way round. `also` is in the same transaction."""

        async def change(session: AsyncSession) -> TrainingRun:
            row = await session.get(TrainingRunRow, model_id)
            if row is None:
                raise _unknown(model_id)
            left = row.snapshot
            for name, value in values.items():
                setattr(row, name, value)
            await loose.own(session, row.snapshot)
            if left is not None and left != row.snapshot:
                await loose.let_go(session, [left])
            if also is not None:
                await also(session)
            return record(TrainingRun, row)

        self._known.put(model_id, await self._db.change(change))

    async def in_memory(self) -> list[TrainingRun]:
        """The models that are not lost or suspended."""
        return await self._found(select(TrainingRunRow).where(TrainingRunRow.status == "active"))

    async def suspended_since_before(self, heartbeat: float) -> list[TrainingRun]:
        """The models on disk whose session is finished, or had its last heartbeat before that."""
        over = or_(SessionRow.finished_at.is_not(None), SessionRow.last_heartbeat < heartbeat)
        return await self._found(
            select(TrainingRunRow).join(SessionRow).where(TrainingRunRow.status == "suspended", over)
        )

    async def _found(self, query: Select[TrainingRunRow]) -> list[TrainingRun]:
        async with self._db.read() as session:
            return [record(TrainingRun, row) for row in await session.scalars(query)]


def _unknown(model_id: str) -> UnknownModel:
    return UnknownModel(f"no model has the id {model_id!r}")
