"""The machine's load over the last day, a value of each measure and minute; and when server and trainers started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from sqlalchemy import Table, select

from tinker_server.store.database import Database, delete_where
from tinker_server.store.tables import MachineLoadRow

LOADS = cast(Table, MachineLoadRow.__table__)
_OF = LOADS.c
KEPT_S = 24 * 3600.0
SERVER_STARTED, TRAINER_RESTARTED, STARTS_KEPT_S = "server_started", "trainer_restarted", 90 * KEPT_S
"""A row of the first measure says when the server started; a row of the second, when the trainer of a base model was
there again after its processes had ended."""
_STARTS = (SERVER_STARTED, TRAINER_RESTARTED)

Measure = tuple[str, str]
"""A measure, such as `kv_cache_used`, and its base model or GPU; "" for the whole machine."""


@dataclass
class Line:
    """The values of a measure in order of time."""

    at: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)


class MachineHistory:
    """Reads and writes the machine_loads table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def put(self, values: Mapping[Measure, float], at: float) -> None:
        """Store a value of each measure, and delete those that are older than a day."""
        if values:
            insert = self._db.insert(LOADS).on_conflict_do_nothing()
            rows = [{"measure": measure, "of": of, "at": at, "value": value} for (measure, of), value in values.items()]
            async with self._db.write() as session:
                await session.execute(insert, rows)
        is_start = _OF.measure.in_(_STARTS)
        await delete_where(self._db, LOADS, (_OF.at < at - KEPT_S) & ~is_start)
        await delete_where(self._db, LOADS, (_OF.at < at - STARTS_KEPT_S) & is_start)

    async def server_starts(self, first: float, last: float) -> list[float]:
        """Return when the server started within a time."""
        return await self._times((SERVER_STARTED, ""), first, last)

    async def trainer_restarts(self, base_model: str, first: float, last: float) -> list[float]:
        """Return when the trainer of a base model was there again, within a time."""
        return await self._times((TRAINER_RESTARTED, base_model), first, last)

    async def _times(self, measure: Measure, first: float, last: float) -> list[float]:
        query = select(_OF.at).where(_OF.measure == measure[0], _OF.of == measure[1], _OF.at.between(first, last))
        async with self._db.read() as session:
            return list(await session.scalars(query.order_by(_OF.at)))

    async def since(self, at: float) -> dict[Measure, Line]:
        """Return the values since a time, by measure."""
        query = select(_OF.measure, _OF.of, _OF.at, _OF.value).where(_OF.at >= at, _OF.measure.not_in(_STARTS))
        query = query.order_by(_OF.at)
        found: dict[Measure, Line] = {}
        async with self._db.read() as session:
            for measure, of, taken_at, value in await session.execute(query):
                line = found.setdefault((measure, of), Line())
                line.at.append(taken_at)
                line.value.append(value)
        return dict(sorted(found.items()))
