"""Metrics that clients report of their runs: rewards, accuracies, evaluations. The client counts the steps."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Table, delete, func, select, tuple_

from tinker_server.errors import LimitReached
from tinker_server.store.database import Database
from tinker_server.store.steps import DELETED_AT_ONCE
from tinker_server.store.tables import ClientMetricRow

METRICS = cast(Table, ClientMetricRow.__table__)
KEY = ("model_id", "name", "step")
MAX_NAMES = 512
"""Different metrics of one run. The cookbook's RL recipes report some 60."""
_OF = METRICS.c


@dataclass(frozen=True)
class Metric:
    """One value of one metric."""

    name: str
    step: int
    at: float
    """Time at which it was reported."""
    value: float


class ClientMetricStore:
    """Reads and writes the client_metrics table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def put(self, model_id: str, step: int, values: Mapping[str, float], at: float) -> None:
        """Store the metrics of one step. A later value of the same metric and step replaces the earlier one.

        Raises LimitReached where the run would have more than MAX_NAMES metrics.
        """
        if not values:
            return
        names = set(await self.names(model_id)) | set(values)
        if len(names) > MAX_NAMES:
            raise LimitReached(f"metrics: the run {model_id} would have {len(names)} names; {MAX_NAMES} are allowed")
        insert = self._db.insert(METRICS)
        put = insert.on_conflict_do_update(
            index_elements=KEY, set_={"value": insert.excluded.value, "at": insert.excluded.at}
        )
        rows = [{"model_id": model_id, "name": name, "step": step, "value": values[name], "at": at} for name in values]
        async with self._db.write() as session:
            await session.execute(put, rows)

    async def names(self, model_id: str) -> list[str]:
        """Return the names of a run's metrics, sorted."""
        query = select(_OF.name).where(_OF.model_id == model_id).distinct().order_by(_OF.name)
        async with self._db.read() as session:
            return list(await session.scalars(query))

    async def last_step(self, model_id: str) -> int | None:
        """Return the last step that a client reported of a run."""
        async with self._db.read() as session:
            return cast("int | None", await session.scalar(select(func.max(_OF.step)).where(_OF.model_id == model_id)))

    async def latest(self, model_id: str, names: Sequence[str]) -> list[Metric]:
        """Return the last value of each of these metrics, in the order of `names`."""
        newest = (
            select(_OF.name, func.max(_OF.step).label("step"))
            .where(_OF.model_id == model_id, _OF.name.in_(names))
            .group_by(_OF.name)
            .subquery()
        )
        query = select(_OF.name, _OF.step, _OF.at, _OF.value).join(
            newest, (newest.c.name == _OF.name) & (newest.c.step == _OF.step)
        )
        async with self._db.read() as session:
            found = [Metric(*row) for row in await session.execute(query.where(_OF.model_id == model_id))]
        return sorted(found, key=lambda metric: names.index(metric.name))

    async def points(self, model_id: str, name: str, bounds: tuple[int, int], most: int) -> list[Metric]:
        """Return a metric's steps within `bounds` (first, last) in order, as means of at most `most` groups."""
        first, last = bounds
        mine = (_OF.model_id == model_id) & (_OF.name == name) & _OF.step.between(first, last)
        async with self._db.read() as session:
            span = (await session.execute(select(func.min(_OF.step), func.max(_OF.step)).where(mine))).one()
            if span[0] is None:
                return []
            size = max(1, -(-(span[1] - span[0] + 1) // most))
            group = (_OF.step - span[0]) // size
            query = select(func.max(_OF.step), func.max(_OF.at), func.avg(_OF.value)).where(mine).group_by(group)
            rows = await session.execute(query.order_by(func.max(_OF.step)))
            return [Metric(name, *row) for row in rows]

    async def pages(self, model_id: str, at_once: int) -> AsyncIterator[list[Metric]]:
        """Yield all of a run, by name and step, in pages of `at_once`."""
        after = ("", -1)
        while True:
            query = (
                select(_OF.name, _OF.step, _OF.at, _OF.value)
                .where(_OF.model_id == model_id, tuple_(_OF.name, _OF.step) > after)
                .order_by(_OF.name, _OF.step)
                .limit(at_once)
            )
            async with self._db.read() as session:
                found = [Metric(*row) for row in await session.execute(query)]
            if not found:
                return
            after = (found[-1].name, found[-1].step)
            yield found

    async def expire(self, before: float) -> int:
        """Delete the metrics reported before this time, a part at a time; return their number."""
        key = tuple(_OF[name] for name in KEY)
        deleted = 0
        while True:
            async with self._db.write() as session:
                old = (await session.execute(select(*key).where(_OF.at < before).limit(DELETED_AT_ONCE))).all()
                if old:
                    await session.execute(delete(METRICS).where(tuple_(*key).in_([tuple(row) for row in old])))
            deleted += len(old)
            if len(old) < DELETED_AT_ONCE:
                return deleted
