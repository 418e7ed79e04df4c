"""Results that were sent to their clients. They make room: large results after a while, others when their owner needs
it.

A client that lost an answer asks again within 75 seconds once it reaches the server: the SDK's timeout and its longest
pause. So a result stays for `RESENT_S` after it was sent. What was sent is noted in memory, and written from time to
time; what a crash loses stays until its time is over.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

from sqlalchemy import Table, delete, select, update

from tinker_server.store.database import Database
from tinker_server.store.tables import FetchedRow, Future

RESENT_S = 600.0
"""Seconds for which a result stays after it was sent: its client may ask again."""
LARGE_BYTES = 1 << 20
"""Results larger than this are deleted after RESENT_S."""
NOTED_BYTES = 1024
"""Smaller results are not noted: they take no more than their row, which stays."""
AT_ONCE = 500
"""Results in a statement: databases limit its parameters."""
FETCHED = cast(Table, FetchedRow.__table__)
_PLAIN = {"synchronize_session": False}


class Sent(NamedTuple):
    """A result that was sent."""

    request_id: str
    owner: str
    at: float
    size_bytes: int


class FetchedResults:
    """Notes what was sent, and deletes it."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._unwritten: dict[str, Sent] = {}

    def note(self, sent: Sent) -> None:
        """Note that the whole of a result was sent."""
        if sent.size_bytes >= NOTED_BYTES:
            self._unwritten[sent.request_id] = sent

    async def save(self) -> None:
        """Write what was noted since the last call."""
        unwritten, self._unwritten = self._unwritten, {}
        rows = [row._asdict() for row in unwritten.values()]
        insert = self._db.insert(FETCHED)
        put = insert.on_conflict_do_update(index_elements=["request_id"], set_={"at": insert.excluded.at})
        try:
            for start in range(0, len(rows), AT_ONCE):
                async with self._db.write_rows() as connection:
                    await connection.execute(put, rows[start : start + AT_ONCE])
        except BaseException:
            self._unwritten = unwritten | self._unwritten
            raise

    async def large(self, before: float) -> list[str]:
        """Return the large results that were sent before this time."""
        query = select(FetchedRow.request_id).where(FetchedRow.size_bytes > LARGE_BYTES, FetchedRow.at < before)
        async with self._db.read() as session:
            return list(await session.scalars(query))

    async def oldest(self, owner: str, before: float, num_bytes: float) -> list[str]:
        """Return the results of an owner that were sent first, before this time, as many as have so many bytes."""
        mine = (FetchedRow.owner == owner) & (FetchedRow.at < before)
        query = select(FetchedRow.request_id, FetchedRow.size_bytes).where(mine).order_by(FetchedRow.at)
        found: list[str] = []
        async with self._db.read() as session:
            for request_id, size_bytes in await session.execute(query):
                if num_bytes <= 0:
                    break
                found.append(request_id)
                num_bytes -= size_bytes
        return found

    async def delete(self, request_ids: Sequence[str]) -> None:
        """Delete these results; each leaves a tombstone, so that polls learn why."""
        for start in range(0, len(request_ids), AT_ONCE):
            some = request_ids[start : start + AT_ONCE]
            done = update(Future).where(Future.request_id.in_(some), Future.status.in_(("done", "failed")))
            async with self._db.write() as session:
                await session.execute(done.values(status="expired", result=None), execution_options=_PLAIN)
                await session.execute(delete(FetchedRow).where(FetchedRow.request_id.in_(some)))

    async def forget(self, before: float) -> None:
        """Forget what was sent before this time: it is gone by its age."""
        async with self._db.write() as session:
            await session.execute(delete(FetchedRow).where(FetchedRow.at < before))
