"""The audit log: changes of saved weights and of sessions' projects."""

import time
import uuid

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.store.database import Database
from tinker_server.store.records import AuditEntry, record
from tinker_server.store.tables import AuditEntryRow

DAY_S = 24 * 3600


class AuditStore:
    """Reads and writes the audit table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def note(self, event: str, owner: str, **details: object) -> None:
        """Record an owner's action."""
        entry_id, at = uuid.uuid4().hex, time.time()

        async def add(session: AsyncSession) -> None:
            row = AuditEntryRow(entry_id=entry_id, owner=owner, at=at, event=event, details=details)
            await session.merge(row)  # it may be there already, if the answer to an earlier commit was lost

        await self._db.change(add)

    async def of_day(self, owner: str, start: float, prefixes: tuple[str, ...]) -> list[AuditEntry]:
        """Return an owner's entries of 24 hours whose event begins with one of `prefixes`, oldest first."""
        within = (AuditEntryRow.at >= start) & (AuditEntryRow.at < start + DAY_S)
        query = select(AuditEntryRow).where(AuditEntryRow.owner == owner, within).order_by(AuditEntryRow.at)
        async with self._db.read() as session:
            return [record(AuditEntry, row) for row in await session.scalars(query) if row.event.startswith(prefixes)]
