"""Recorded steps: the curves of a run. They are written in the transaction of their results (`futures/rows.py`)."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinker_server.store.database import Database, delete_before
from tinker_server.store.records import Step, columns
from tinker_server.store.tables import CheckpointRow, StepRow

STEPS = cast(Table, StepRow.__table__)
RECENT = 8
"""The number of a run's last operations that show how it is doing."""
_OF = STEPS.c


@dataclass(frozen=True)
class Point:
    """Consecutive steps of a run: means, or sums of quantities that add up."""

    step: int
    """The last of them."""
    at: float
    loss: float | None
    """Mean over the positions that train, of the batches whose loss is finite."""
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_s: float | None
    """Tokens per second of the batches' run time, without the time they waited."""
    sampler_gap: float | None
    divergence: float | None
    clip_fraction: float | None
    advantage: float | None
    shared_tokens: float | None
    """Sum of the positions that were not computed."""
    waited_s: float
    run_s: float


_IS_BATCH = _OF.loss_tokens > 0
_POINT = (
    func.max(_OF.step),
    func.max(_OF.at),
    func.sum(_OF.loss) / func.nullif(func.sum(_OF.loss_tokens).filter(_OF.loss.is_not(None)), 0),
    func.avg(_OF.grad_norm),
    func.avg(_OF.learning_rate),
    func.sum(_OF.tokens).filter(_IS_BATCH) / func.nullif(func.sum(_OF.run_s).filter(_IS_BATCH), 0),
    func.avg(_OF.sampler_gap),
    func.avg(_OF.divergence),
    func.avg(_OF.clip_fraction),
    func.avg(_OF.advantage),
    func.sum(_OF.shared_tokens),
    func.sum(_OF.waited_s),
    func.sum(_OF.run_s),
)


async def insert(connection: AsyncConnection, db: Database, steps: Sequence[Step]) -> None:
    """Within a transaction, insert the steps that are not there yet."""
    if steps:
        await connection.execute(db.insert(STEPS).on_conflict_do_nothing(), [columns(step) for step in steps])


class StepStore:
    """Reads recorded steps, and deletes old steps."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def last(self, model_id: str) -> Step | None:
        """Return the last operation of a run."""
        found = await self.recent([model_id], 1)
        return found[model_id][-1] if found else None

    async def recent(self, model_ids: Sequence[str], count: int = RECENT) -> dict[str, list[Step]]:
        """Return the last operations of each run that has any, in order."""
        found: dict[str, list[Step]] = {}
        async with self._db.read() as session:
            for model_id in model_ids:
                query = select(STEPS).where(_OF.model_id == model_id).order_by(_OF.seq_id.desc()).limit(count)
                if rows := (await session.execute(query)).mappings().all():
                    found[model_id] = [Step(**row) for row in reversed(rows)]
        return found

    async def last_before(self, model_id: str, seq_id: int) -> Step | None:
        """Return the last operation of a run before this number."""
        query = select(STEPS).where(_OF.model_id == model_id, _OF.seq_id < seq_id).order_by(_OF.seq_id.desc()).limit(1)
        async with self._db.read() as session:
            row = (await session.execute(query)).mappings().first()
        return None if row is None else Step(**row)

    async def steps_at_saves(self, model_id: str, most: int) -> dict[int, int]:
        """Return the steps of a run before each of its newest saves, by the number of the operation that saved."""
        save = CheckpointRow
        before = select(func.max(_OF.seq_id)).where(_OF.model_id == model_id, _OF.seq_id < save.saved_as)
        saves = select(save.saved_as, before.scalar_subquery()).where(
            save.run_id == model_id, save.saved_as.is_not(None)
        )
        async with self._db.read() as session:
            found = (await session.execute(saves.order_by(save.created_at.desc()).limit(most))).all()
            last = [seq_id for _, seq_id in found if seq_id is not None]
            of = select(_OF.seq_id, _OF.step, _OF.learning_rate).where(_OF.model_id == model_id, _OF.seq_id.in_(last))
            steps = {row.seq_id: row.step + (row.learning_rate is not None) for row in await session.execute(of)}
        return {number: steps.get(seq_id, 0) for number, seq_id in found}

    async def points(self, model_id: str, first: int, last: int, most: int) -> list[Point]:
        """Return the steps from `first` to `last` in order, as at most `most` groups of equal size."""
        size = max(1, -(-(last - first + 1) // most))
        group = (_OF.step - first) // size
        mine = (_OF.model_id == model_id) & _OF.step.between(first, last)
        query = select(*_POINT).where(mine).group_by(group).order_by(func.max(_OF.seq_id))
        async with self._db.read() as session:
            return [Point(*row) for row in await session.execute(query)]

    async def pages(self, model_id: str, at_once: int) -> AsyncIterator[list[Step]]:
        """Yield the steps of a run in order, in pages of `at_once`."""
        after = -1
        while True:
            query = select(STEPS).where(_OF.model_id == model_id, _OF.seq_id > after).order_by(_OF.seq_id)
            async with self._db.read() as session:
                rows = [Step(**row) for row in (await session.execute(query.limit(at_once))).mappings()]
            if not rows:
                return
            after = rows[-1].seq_id
            yield rows

    async def expire(self, before: float) -> int:
        """Delete the rows before this time, a part at a time; return their number."""
        return await delete_before(self._db, STEPS, before)
