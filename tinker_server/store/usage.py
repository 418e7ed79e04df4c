"""What was used, by hour, and what was done."""

import time
import uuid
from collections import Counter
from typing import Any, Literal, cast

from sqlalchemy import Table, select

from tinker_server.store.database import Database
from tinker_server.store.tables import AuditEntry, Session, Usage

USAGE = cast(Table, Usage.__table__)
HOUR_S = 3600
DAY_S = 24 * HOUR_S
UsageKind = Literal["training", "prefill", "cached_prefill", "sampled", "checkpoint"]


class UsageStore:
    """The only way to the usage table. Counts gather in memory and are written from time to time."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._unwritten: Counter[tuple[float, UsageKind, str, str]] = Counter()

    def count(self, kind: UsageKind, session_id: str, base_model: str, amount: int) -> None:
        """Note that so much was done now."""
        if amount > 0:
            self._unwritten[time.time() // HOUR_S * HOUR_S, kind, session_id, base_model] += amount

    async def save(self) -> None:
        """Write what was counted since the last time."""
        counts, self._unwritten = self._unwritten, Counter()
        if not counts:
            return
        insert = self._db.insert(USAGE)
        add = insert.on_conflict_do_update(
            index_elements=["hour", "kind", "session_id", "base_model"],
            set_={"amount": USAGE.c.amount + insert.excluded.amount},
        )
        names = ("hour", "kind", "session_id", "base_model")
        rows = [dict(zip(names, key, strict=True), amount=amount) for key, amount in counts.items()]
        try:
            async with self._db.write() as session:
                await session.execute(add, rows)
        except BaseException:
            self._unwritten += counts
            raise

    async def between(self, owner: str, start: float, end: float) -> list[tuple[Usage, Session]]:
        """What an owner used in hours that begin in [start, end), by hour, then the largest first; with its session."""
        await self.save()
        query = (
            select(Usage, Session)
            .join(Session, Session.session_id == Usage.session_id)
            .where(Session.owner == owner, Usage.hour >= start, Usage.hour < end)
            .order_by(Usage.hour, Usage.amount.desc())
        )
        async with self._db.read() as session:
            return [(used, of) for used, of in (await session.execute(query)).all()]


class AuditStore:
    """The only way to the audit table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def note(self, event: str, owner: str, **details: Any) -> None:
        """Record something that an owner did."""
        row = AuditEntry(entry_id=uuid.uuid4().hex, owner=owner, at=time.time(), event=event, details=details)
        async with self._db.write() as session:
            session.add(row)

    async def of_day(self, owner: str, start: float, prefixes: tuple[str, ...]) -> list[AuditEntry]:
        """An owner's entries of 24 hours whose event begins with one of `prefixes`, oldest first."""
        within = (AuditEntry.at >= start) & (AuditEntry.at < start + DAY_S)
        query = select(AuditEntry).where(AuditEntry.owner == owner, within).order_by(AuditEntry.at)
        async with self._db.read() as session:
            return [row for row in await session.scalars(query) if row.event.startswith(prefixes)]
