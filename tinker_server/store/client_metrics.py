"""Metrics that clients report of their runs: rewards, accuracies, evaluations. The client counts the steps."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Table, case, func, select, tuple_

from tinker_server.backends.lru import LRU
from tinker_server.errors import LimitReached
from tinker_server.store.database import Database, delete_before
from tinker_server.store.tables import ClientMetricRow, TrainingRunRow

METRICS = cast(Table, ClientMetricRow.__table__)
KEY = ("model_id", "name", "step")
MAX_NAMES = 512
"""Different metrics of a run. The cookbook's RL recipes report some 60."""
MAX_VALUES = 1 << 22
"""Values of a run, all metrics together: 70,000 steps of 60 metrics. They take about 400 MB of the database."""
HUGE = 1e300
"""So many times the values of a run, summed, are finite. Larger values are scaled before they are summed: a database
answers an overflow with an error or with infinity."""
VALUE_BYTES = 400
"""Bytes of the database for a value, with its key in the indexes: 40,000 took 15 MiB."""
RUNS_COUNTED = 1000
"""Runs whose names and number of values are kept in memory."""
_OF = METRICS.c


@dataclass(frozen=True)
class Metric:
    """A value of a metric."""

    name: str
    step: int
    at: float
    """Time at which it was reported."""
    value: float


@dataclass
class Counted:
    """Stored metrics of a run."""

    names: set[str]
    num_values: int
    """At least so many; fewer where later values have replaced earlier values."""


class ClientMetricStore:
    """Reads and writes the client_metrics table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._counted: LRU[str, Counted] = LRU(RUNS_COUNTED)

    async def put(self, model_id: str, step: int, values: Mapping[str, float], at: float) -> None:
        """Store the metrics of a step. A later value of the same metric and step replaces the earlier value.

        Raises LimitReached where the run would have more than MAX_NAMES metrics or MAX_VALUES values.
        """
        if not values:
            return
        counted = await self._count(model_id)
        if counted.num_values + len(values) > MAX_VALUES:
            self._counted.pop(model_id)
            counted = await self._count(model_id)
        num_names, num_values = len(counted.names | set(values)), counted.num_values + len(values)
        if num_names > MAX_NAMES:
            raise LimitReached(f"metrics: the run {model_id} would have {num_names} names; {MAX_NAMES} are allowed")
        if num_values > MAX_VALUES:
            raise LimitReached(f"metrics: the run {model_id} would have {num_values} values; {MAX_VALUES} are allowed")
        insert = self._db.insert(METRICS)
        put = insert.on_conflict_do_update(
            index_elements=KEY, set_={"value": insert.excluded.value, "at": insert.excluded.at}
        )
        rows = [{"model_id": model_id, "name": name, "step": step, "value": values[name], "at": at} for name in values]
        counted.num_values += len(values)  # before the write, so that writes at the same time see it
        async with self._db.write() as session:
            await session.execute(put, rows)
        counted.names |= set(values)

    async def held_bytes(self, owner: str) -> int:
        """Return about how many bytes the metrics of an owner's runs take."""
        query = select(func.count()).select_from(METRICS).join(TrainingRunRow, TrainingRunRow.model_id == _OF.model_id)
        async with self._db.read() as session:
            return VALUE_BYTES * int(await session.scalar(query.where(TrainingRunRow.owner == owner)) or 0)

    async def _count(self, model_id: str) -> Counted:
        """Count a run's names and values, once: later values are added by `put`."""
        if (counted := self._counted.get(model_id)) is None:
            query = select(_OF.name, func.count()).where(_OF.model_id == model_id).group_by(_OF.name)
            async with self._db.read() as session:
                of_names = {name: int(count) for name, count in await session.execute(query)}
            counted = self._counted.setdefault(model_id, Counted(set(of_names), sum(of_names.values())))
        return counted

    async def names(self, model_id: str) -> list[str]:
        """Return the names of a run's metrics, sorted."""
        return sorted((await self._count(model_id)).names)

    async def last_step(self, model_id: str) -> int | None:
        """Return the last step that a client reported of a run."""
        async with self._db.read() as session:
            return cast("int | None", await session.scalar(select(func.max(_OF.step)).where(_OF.model_id == model_id)))

    async def newest(self, model_id: str, names: Sequence[str]) -> list[Metric]:
        """Return the value of the last step of each of these metrics that there is."""
        found: list[Metric] = []
        columns = (_OF.name, _OF.step, _OF.at, _OF.value)
        async with self._db.read() as session:
            for name in names:
                of_name = select(*columns).where(_OF.model_id == model_id, _OF.name == name)
                rows = await session.execute(of_name.order_by(_OF.step.desc()).limit(1))
                found += [Metric(*row) for row in rows]
        return found

    async def points(
        self, model_id: str, names: Sequence[str], bounds: tuple[int, int], most: int
    ) -> dict[str, list[Metric]]:
        """Return the steps within `bounds` (first, last) of each of these metrics in order, by name.

        Neighbours are averaged so that no metric has more than `most` points: as many each, since a client may leave
        out any number of steps.
        """
        wanted = (_OF.model_id == model_id, _OF.name.in_(names), _OF.step.between(*bounds))
        counts = select(_OF.name, func.count().label("count")).where(*wanted).group_by(_OF.name).subquery().c
        place = func.row_number().over(partition_by=_OF.name, order_by=_OF.step) - 1
        numbered = select(_OF.name, _OF.step, _OF.at, _OF.value, place.label("place")).where(*wanted).subquery().c
        group = numbered.place // ((counts["count"] + most - 1) // most)
        is_huge = func.abs(numbered.value) > HUGE
        sums = (
            func.sum(case((is_huge, 0.0), else_=numbered.value)),
            func.sum(case((is_huge, numbered.value / MAX_VALUES), else_=0.0)),
        )
        query = (
            select(numbered.name, func.max(numbered.step), func.max(numbered.at), func.count(), *sums)
            .where(numbered.name == counts.name)
            .group_by(numbered.name, group)
            .order_by(numbered.name, func.max(numbered.step))
        )
        found: dict[str, list[Metric]] = {name: [] for name in names}
        async with self._db.read() as session:
            for name, step, at, count, *of_group in await session.execute(query):
                found[name].append(Metric(name, step, at, _mean(count, *of_group)))
        return found

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
        num_deleted = await delete_before(self._db, METRICS, before)
        if num_deleted:
            self._counted.clear()
        return num_deleted


def _mean(count: int, total: float, scaled: float) -> float:
    """Return the mean of values by their number, their sum without the huge values, and the sum of the scaled huge
    values.

    Rounding may lift the mean of the largest numbers just beyond what a float holds.
    """
    mean = total / count + scaled / count * MAX_VALUES
    return max(-sys.float_info.max, min(mean, sys.float_info.max))
