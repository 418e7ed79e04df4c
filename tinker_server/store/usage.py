"""Usage by hour. It is counted in memory and written from time to time."""

import time
from collections import Counter
from typing import Literal, cast

from sqlalchemy import Table, func, select

from tinker_server.store.database import Database
from tinker_server.store.records import Session, UsageAmount, record
from tinker_server.store.tables import SessionRow, UsageRow

USAGE = cast(Table, UsageRow.__table__)
KEY = ("hour", "kind", "owner", "session_id", "base_model")
HOUR_S = 3600
NO_SESSION = ""
"""The session_id of samples outside any session."""
UsageKind = Literal["training", "prefill", "cached_prefill", "sampled", "checkpoint"]


class UsageStore:
    """Reads and writes the usage table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._unwritten: Counter[tuple[float, UsageKind, str, str, str]] = Counter()
        self.totals: Counter[tuple[UsageKind, str]] = Counter()
        """Amounts by kind and base model, since the server started."""

    def count(self, kind: UsageKind, owner: str, session_id: str, base_model: str, amount: int) -> None:
        """Count an amount in the current hour."""
        assert amount >= 0, f"{amount} of {kind}"
        if amount:
            self.totals[kind, base_model] += amount
            self._unwritten[time.time() // HOUR_S * HOUR_S, kind, owner, session_id, base_model] += amount

    async def save(self) -> None:
        """Write the amounts that were counted since the last call."""
        counts, self._unwritten = self._unwritten, Counter()
        if not counts:
            return
        insert = self._db.insert(USAGE)
        add = insert.on_conflict_do_update(index_elements=KEY, set_={"amount": USAGE.c.amount + insert.excluded.amount})
        rows = [dict(zip(KEY, key, strict=True), amount=amount) for key, amount in counts.items()]
        try:
            async with self._db.write() as session:
                await session.execute(add, rows)
        except BaseException:
            self._unwritten += counts
            raise

    async def between(self, owner: str, start: float, end: float) -> list[UsageAmount]:
        """Return an owner's usage of hours that begin in [start, end), by hour, then the largest first."""
        await self.save()
        query = (
            select(UsageRow, SessionRow)
            .outerjoin(SessionRow, SessionRow.session_id == UsageRow.session_id)
            .where(UsageRow.owner == owner, UsageRow.hour >= start, UsageRow.hour < end)
            .order_by(UsageRow.hour, UsageRow.amount.desc())
        )
        async with self._db.read() as session:
            return [_amount(used, of) for used, of in (await session.execute(query)).all()]

    async def by_owner(self, start: float) -> Counter[tuple[str, str]]:
        """Return amounts by owner and kind, of hours that begin at `start` or later."""
        await self.save()
        query = select(UsageRow.owner, UsageRow.kind, func.sum(UsageRow.amount)).where(UsageRow.hour >= start)
        async with self._db.read() as session:
            rows = await session.execute(query.group_by(UsageRow.owner, UsageRow.kind))
            return Counter({(owner, kind): int(amount) for owner, kind, amount in rows})


def _amount(used: UsageRow, of: SessionRow | None) -> UsageAmount:
    return UsageAmount(
        hour=used.hour,
        kind=used.kind,
        session_id=used.session_id,
        base_model=used.base_model,
        amount=used.amount,
        session=None if of is None else record(Session, of),
    )
