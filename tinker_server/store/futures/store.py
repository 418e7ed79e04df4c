"""Accepted operations and their results, from the submit to the deletion of the result.

An operation is accepted, and a result answered, once it is stored. Polls are woken by events; nothing polls the
database.
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tinker_server.backends.lru import LRU
from tinker_server.errors import BadRequest, DatabaseUnavailable, ResultExpired, UnknownFuture
from tinker_server.store.database import Database
from tinker_server.store.futures.batch_writer import BatchWriter
from tinker_server.store.futures.fetched import RESENT_S, FetchedResults, Sent
from tinker_server.store.futures.notifications import Changes, Completions
from tinker_server.store.futures.observers import Observers
from tinker_server.store.futures.queue import FutureQueue
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.replay_log import Entry
from tinker_server.store.futures.rows import FutureRows

log = logging.getLogger(__name__)
TOMBSTONES_KEPT_S = 7 * 24 * 3600
DELETIONS_AT_ONCE, IDS_AT_ONCE = 10, 500
"""Statements in a transaction, and ids in a statement: submits and results come between."""
Admit = Callable[[int], Awaitable[object]]
"""Is awaited with the size of a stored result before it is handed out."""
MAX_RESULT_BYTES = 512 << 20
"""Bytes of an operation's result. SQLite takes 10^9 bytes in a value, PostgreSQL 2^30."""


async def _at_once(_: int) -> None:
    """Hand out a result of any size."""


class FutureStore:
    """The futures: `queue` has the unfinished operations, `rows` the stored operations, and the rest serves results."""

    def __init__(
        self,
        db: Database,
        recent_bytes: int,
        clock: Callable[[], float] = time.time,
        max_result_bytes: int = MAX_RESULT_BYTES,
        observers: Observers | None = None,
    ) -> None:
        """`recent_bytes`: results cached in memory."""
        observers = observers or Observers()
        observers.stored.insert(0, self._note_stored)
        self.rows = FutureRows(db)
        self.queue = FutureQueue(self.rows, clock, max_result_bytes, observers)
        self.fetched = FetchedResults(db)
        self.completions = Completions(self.rows.completions)
        self.changes = Changes()
        """Notifications of stored results."""
        self._clock = clock
        self._recent: LRU[str, Result] = LRU(recent_bytes, lambda result: len(result.body))
        self._announced: set[str] = set()
        self._deletions = BatchWriter("deletions writer", self._write_deletions, DELETIONS_AT_ONCE)

    async def start(self) -> list[Operation]:
        """Start writing; return the operations that an earlier server left unfinished."""
        left = await self.queue.start()
        self._deletions.start()
        return left

    async def stop(self) -> None:
        """Write what is pending, then end."""
        await self.queue.stop()
        await self._deletions.stop()
        with contextlib.suppress(DatabaseUnavailable):  # what is lost stays until its time is over
            await self.fetched.save()

    async def read_log(self, model_id: str) -> AsyncIterator[Entry]:
        """Yield the log of a model in order, with what is still on its way to the database."""
        await self.queue.flush()
        after = 0
        while page := await self.rows.read_log(model_id, after):
            for entry in page:
                yield entry
            after = page[-1].position

    async def wait(self, request_id: str, owner: str, hold_s: float, admit: Admit = _at_once) -> Result | None:
        """Return the result; None if it is not there within `hold_s`. Raises UnknownFuture, ResultExpired, and whatever
        `admit` does."""
        if (operation := self.queue.get(request_id)) is not None:
            if operation.owner != owner:
                raise _unknown(request_id)
            if not await self.queue.hold(request_id, hold_s):
                return None
        if (recent := self._recent.get(request_id)) is not None:
            if recent.owner != owner:
                raise _unknown(request_id)
            await admit(len(recent.body))
            return recent
        await admit(await self.rows.result_bytes(request_id, owner))
        result = await self._load(request_id, owner)
        if result is None:
            await self.queue.hold(request_id, hold_s)
        return result

    def first_time_large(self, request_id: str) -> bool:
        """Return whether this is the first call for this result: its size may be sent once instead of it."""
        is_first = request_id not in self._announced
        self._announced.add(request_id)
        return is_first

    async def require_sample(self, request_id: str) -> None:
        """Raise UnknownFuture for an operation that is no sample."""
        operation = self.queue.get(request_id)
        kind = (await self.rows.identity(request_id))[0] if operation is None else operation.operation_kind
        if kind not in (None, "sample"):
            raise _unknown(request_id)

    async def require_finished_sample(self, request_id: str, owner: str) -> None:
        """Raise UnknownFuture, or BadRequest for an operation that cannot be cancelled."""
        if (operation := self.queue.get(request_id)) is not None and operation.owner == owner:
            if operation.result is not None:
                return
            raise BadRequest(f"{request_id} is {operation.operation_kind}; only samples can be cancelled")
        if (await self.rows.identity(request_id))[1] != owner:
            raise _unknown(request_id)

    def acknowledge(self, lane: str, request_ids: list[str]) -> None:
        """Delete results of a lane that its client has. Those that are not finished stay."""
        for start in range(0, len(request_ids), IDS_AT_ONCE):
            self._deletions.put((lane, request_ids[start : start + IDS_AT_ONCE]))

    def release(self) -> None:
        """End all waits without a result: the server stops."""
        self.queue.release()
        self.completions.release()
        self.changes.release()

    async def expire(self, before: float) -> None:
        """Delete results that finished before; each leaves a tombstone for a while, so that polls learn why."""
        await self.queue.flush()
        self._recent.keep(lambda result: result.finished_at >= before)
        self.completions.evict_idle()
        self._announced.clear()
        await self.rows.expire(before, before - TOMBSTONES_KEPT_S)
        await self.fetched.forget(before)

    async def note_sent(self, request_id: str, result: Result) -> None:
        """Note that the whole of a result was sent to its client."""
        self.fetched.note(Sent(request_id, result.owner, self._clock(), len(result.body)))

    async def expire_large(self, now: float) -> None:
        """Delete the large results that were sent a while ago."""
        await self.fetched.save()
        await self._expire(await self.fetched.large(now - RESENT_S))

    async def expire_fetched(self, owner: str, num_bytes: float, now: float) -> int:
        """Delete an owner's results that were sent first, a while ago, until so many bytes are free; return their
        number."""
        await self.fetched.save()
        request_ids = await self.fetched.oldest(owner, now - RESENT_S, num_bytes)
        await self._expire(request_ids)
        return len(request_ids)

    async def _expire(self, request_ids: list[str]) -> None:
        await self.fetched.delete(request_ids)
        for request_id in request_ids:
            self._recent.pop(request_id)

    def _note_stored(self, request_id: str, result: Result) -> None:
        self._recent.put(request_id, result)
        self.changes.note(result.owner)
        self.completions.note(request_id, result)

    async def _load(self, request_id: str, owner: str) -> Result | None:
        row = await self.rows.outcome(request_id, owner)
        if row is None:
            raise _unknown(request_id)
        if row.status == "expired":
            raise ResultExpired(f"the result of {request_id} was fetched, or kept for its time, and is gone")
        if row.result is None or row.result_type is None or row.finished_at is None:
            return None
        result = Result(
            row.result,
            row.result_type,
            row.status == "failed",
            row.failure_category,
            row.finished_at,
            row.kind,
            row.lane,
            row.seq_id,
            owner,
        )
        self._recent.put(request_id, result)
        return result

    async def _write_deletions(self, batch: list[tuple[str, list[str]]]) -> None:
        try:
            await self.rows.delete_results(batch)
        except DatabaseUnavailable as error:  # results that stay are deleted when their time is over
            log.debug("fetched results stay for a while: %s", error)
        except Exception:
            log.exception("failed to delete fetched results")
        for lane, request_ids in batch:
            for request_id in request_ids:
                if (recent := self._recent.get(request_id)) is not None and recent.lane == lane:
                    self._recent.pop(request_id)


def _unknown(request_id: str) -> UnknownFuture:
    return UnknownFuture(f"no operation has the request_id {request_id!r}")
