"""Usage by hour. It is counted in memory and written from time to time."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple
from typing import cast as typed

from sqlalchemy import BigInteger, Table, Text, cast, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.store.database import Database
from tinker_server.store.futures.observers import Work
from tinker_server.store.records import UsageKind
from tinker_server.store.tables import SessionRow, UsageRow

USAGE = typed(Table, UsageRow.__table__)
KEY = ("hour", "kind", "owner", "session_id", "base_model")
Key = tuple[float, UsageKind, str, str, str]
HOUR_S = 3600
TRAINED = ("forward", "forward_backward", "optim_step")
"""Operations for which the trainer computes."""
AT_ONCE = 1000
"""Amounts of a page: the event loop takes them from the database in a few milliseconds."""


class UsageAmount(NamedTuple):
    """The amount of a kind of work in an hour."""

    hour: float
    kind: str
    session_id: str
    base_model: str
    amount: int
    project_id: str | None
    """Project of the session, if any."""


class SessionMetadata(NamedTuple):
    """What the client noted of a session."""

    session_id: str
    user_metadata: str
    """In JSON."""


class UsageStore:
    """Reads and writes the usage table."""

    def __init__(self, db: Database, ranks_of: Callable[[str], int] = lambda _: 1) -> None:
        """`ranks_of`: number of the trainer's ranks, by base model."""
        self._db, self._ranks_of = db, ranks_of
        self._amounts: Counter[Key] = Counter()
        """Amounts since the server started and, in `_whole_hours`, before that."""
        self._whole_hours: set[float] = set()
        self._unwritten: set[Key] = set()
        self.totals: Counter[tuple[UsageKind, str]] = Counter()
        """Amounts by kind and base model, since the server started."""

    def count(self, kind: UsageKind, owner: str, session_id: str, base_model: str, amount: int) -> None:
        """Count an amount in the current hour."""
        assert amount >= 0, f"{amount} of {kind}"
        if amount:
            self.totals[kind, base_model] += amount
            key = (time.time() // HOUR_S * HOUR_S, kind, owner, session_id, base_model)
            self._amounts[key] += amount
            self._unwritten.add(key)

    async def on_success(self, work: Work[Any]) -> None:
        """Count what an operation used."""
        used = dict(work.used)
        if work.operation.operation_kind in TRAINED:
            used["trainer_ms"] = round(work.run_s * 1000 * self._ranks_of(work.base_model))
        for kind, amount in used.items():
            self.count(kind, work.operation.owner, work.session_id, work.base_model, amount)

    async def save(self) -> None:
        """Write the amounts that have changed since the last call. Raises DatabaseUnavailable."""
        if not self._unwritten:
            return
        insert = self._db.insert(USAGE)
        # Whole amounts, no increments: those of a commit whose answer was lost are written again.
        put = insert.on_conflict_do_update(index_elements=KEY, set_={"amount": insert.excluded.amount})
        async with self._db.write() as session:
            keys = list(self._unwritten)  # what is counted from here on may be in an hour that is not whole
            await self._make_whole({key[0] for key in keys}, session)
            written = {key: self._amounts[key] for key in keys}
            rows = [dict(zip(KEY, key, strict=True), amount=amount) for key, amount in written.items()]
            await session.execute(put, rows)
        self._unwritten = {key for key in self._unwritten if self._amounts[key] != written.get(key)}

    async def _make_whole(self, hours: set[float], session: AsyncSession) -> None:
        """Add what earlier servers counted in these hours, unless it has been added: nothing of this server is stored
        before. Forget all other hours, which are written."""
        if self._whole_hours - hours:
            self._whole_hours &= hours
            self._amounts = Counter({key: amount for key, amount in self._amounts.items() if key[0] in hours})
        if left := hours - self._whole_hours:
            earlier = await session.execute(select(USAGE).where(USAGE.c.hour.in_(left)))
            self._amounts.update({typed(Key, tuple(key)): amount for *key, amount in earlier})
            self._whole_hours |= left

    async def between(
        self, owner: str, start: float, end: float, at_once: int = AT_ONCE
    ) -> AsyncIterator[Sequence[UsageAmount]]:
        """Yield an owner's usage of hours that begin in [start, end), by hour, in pages."""
        await self.save()
        row = UsageRow
        columns = (row.hour, row.kind, row.session_id, row.base_model, row.amount, SessionRow.project_id)
        key = (row.hour, row.kind, row.session_id, row.base_model)  # amounts grow meanwhile, and have no fixed order
        query = (
            select(*columns)
            .outerjoin(SessionRow, SessionRow.session_id == row.session_id)
            .where(row.owner == owner, row.hour < end, row.kind != "trainer_ms")  # no kind of the API
            .order_by(*key)
            .limit(at_once)
        )
        after: tuple[float, str, str, str] = (start, "", "", "")
        while True:
            later = query.where(row.hour >= after[0], tuple_(*key) > after)
            async with self._db.read_of(owner) as session:
                page = [UsageAmount(*found) for found in await session.execute(later)]
            if page:
                after = page[-1][:4]
                yield page
            if len(page) < at_once:
                return

    async def metadata(
        self, owner: str, session_ids: Sequence[str], at_once: int = AT_ONCE // 10
    ) -> AsyncIterator[Sequence[SessionMetadata]]:
        """Yield the metadata of those of an owner's sessions that are known, in pages."""
        for start in range(0, len(session_ids), at_once):
            wanted = SessionRow.session_id.in_(session_ids[start : start + at_once])
            query = select(SessionRow.session_id, cast(SessionRow.user_metadata, Text))
            async with self._db.read_of(owner) as session:
                page = [SessionMetadata(*found) for found in await session.execute(query.where(wanted))]
            if page:
                yield page

    async def by_day(self, owner: str | None, start: float) -> Counter[tuple[int, str, str]]:
        """Return amounts by day since 1970 (UTC), owner and kind, of hours from `start` on; of an owner, or of all."""
        await self.save()
        day = cast(UsageRow.hour, BigInteger) // (24 * HOUR_S)
        query = select(day, UsageRow.owner, UsageRow.kind, func.sum(UsageRow.amount)).where(UsageRow.hour >= start)
        if owner is not None:
            query = query.where(UsageRow.owner == owner)
        async with self._db.read() as session:
            rows = await session.execute(query.group_by(day, UsageRow.owner, UsageRow.kind))
            return Counter({(int(at), name, kind): int(amount) for at, name, kind, amount in rows})

    async def by_owner(self, start: float) -> Counter[tuple[str, str]]:
        """Return amounts by owner and kind, of hours that begin at `start` or later."""
        await self.save()
        query = select(UsageRow.owner, UsageRow.kind, func.sum(UsageRow.amount)).where(UsageRow.hour >= start)
        async with self._db.read() as session:
            rows = await session.execute(query.group_by(UsageRow.owner, UsageRow.kind))
            return Counter({(owner, kind): int(amount) for owner, kind, amount in rows})
