"""The audit log: changes of saved weights and of sessions' projects."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Text, cast, false, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.accounts import Records
from tinker_server.store.database import Database
from tinker_server.store.tables import AuditEntryRow

DAY_S = 24 * 3600
AT_ONCE = 1000
"""Entries of a page: the event loop takes them from the database in a few milliseconds."""


class AuditEntry(NamedTuple):
    """An entry of the audit log."""

    entry_id: str
    at: float
    event: str
    details: str
    """In JSON."""


class OwnedEntry(NamedTuple):
    """An entry with its owner."""

    owner: str
    at: float
    event: str
    details: dict[str, Any]


class AuditStore:
    """Reads and writes the audit table."""

    def __init__(self, db: Database, records: Records, on_change: Callable[[str], None] = lambda owner: None) -> None:
        self._db, self._records, self._on_change = db, records, on_change

    def admit(self, owner: str) -> None:
        """Count an action that an owner asks for, and that will be noted. Raises Busy for too many in an hour."""
        self._records.add(owner)

    async def note(self, event: str, owner: str, **details: object) -> None:
        """Record an owner's action, and notify of it."""
        entry_id, at = uuid.uuid4().hex, time.time()

        async def add(session: AsyncSession) -> None:
            row = AuditEntryRow(entry_id=entry_id, owner=owner, at=at, event=event, details=details)
            await session.merge(row)  # it may be there already, if the answer to an earlier commit was lost

        await self._db.change(add)
        self._on_change(owner)

    async def newest_of_day(self, owner: str | None, start: float, limit: int) -> list[OwnedEntry]:
        """Return the newest entries of 24 hours, of an owner or of all."""
        row = AuditEntryRow
        query = select(row.owner, row.at, row.event, row.details).where(row.at >= start, row.at < start + DAY_S)
        if owner is not None:
            query = query.where(row.owner == owner)
        async with self._db.read() as session:
            rows = await session.execute(query.order_by(row.at.desc(), row.entry_id).limit(limit))
            return [OwnedEntry(*found) for found in rows]

    async def of_day(
        self, owner: str, start: float, prefixes: tuple[str, ...], at_once: int = AT_ONCE
    ) -> AsyncIterator[Sequence[AuditEntry]]:
        """Yield an owner's entries of 24 hours whose event begins with any of `prefixes`, oldest first, in pages."""
        row = AuditEntryRow
        wanted = or_(false(), *(row.event.startswith(prefix, autoescape=True) for prefix in prefixes))
        columns = (row.entry_id, row.at, row.event, cast(row.details, Text))
        query = select(*columns).where(row.owner == owner, row.at < start + DAY_S, wanted)
        query = query.order_by(row.at, row.entry_id).limit(at_once)
        after = (start, "")
        while True:
            later = query.where(row.at >= after[0], tuple_(row.at, row.entry_id) > after)
            async with self._db.read_of(owner) as session:
                page = [AuditEntry(*found) for found in await session.execute(later)]
            if page:
                after = (page[-1].at, page[-1].entry_id)
                yield page
            if len(page) < at_once:
                return
