"""The futures: accepted operations and their results.

An operation is accepted, and a result answered, once it is stored. Submits, results and deletions are committed
apart from one another, each in batches. Waiters are woken by events; nothing polls.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from backends.lru import LRU
from tinker_server.errors import BadRequest, DatabaseUnavailable, ResultExpired, ResultTooLarge, UnknownFuture
from tinker_server.store.database import Database
from tinker_server.store.futures.batch_writer import BatchWriter
from tinker_server.store.futures.changes import Changes
from tinker_server.store.futures.notifications import Completion, Completions, Target
from tinker_server.store.futures.queue import Submits
from tinker_server.store.futures.records import Accepted, Operation, PastOperation
from tinker_server.store.futures.replay_log import Entry
from tinker_server.store.futures.results import Result
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.futures.storing import Storing
from tinker_server.store.futures.waiters import Waiters

log = logging.getLogger(__name__)
TOMBSTONES_KEPT_S = 7 * 24 * 3600
DELETIONS_AT_ONCE, IDS_AT_ONCE = 10, 500
"""Statements in one transaction, and ids in one statement: submits and results come between."""
MAX_RESULT_BYTES = 512 << 20
"""Of one operation. SQLite takes 10^9 bytes in one value, PostgreSQL 2^30."""


class FutureStore:
    """What becomes of accepted operations."""

    def __init__(
        self,
        db: Database,
        recent_bytes: int,
        clock: Callable[[], float] = time.time,
        max_result_bytes: int = MAX_RESULT_BYTES,
        on_stored: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """`on_stored` is told of each operation whose result is stored."""
        self._rows = FutureRows(db)
        self._max_result_bytes = max_result_bytes
        self._on_stored = on_stored
        self._recent: LRU[str, Result] = LRU(recent_bytes, lambda result: len(result.body))
        self._waiters = Waiters()
        self._completions = Completions(self._rows.completions)
        self.changes = Changes()
        """Of results that were stored."""
        self._announced: set[str] = set()
        self.last_position = 0
        """In a log that was given."""
        self._submits = Submits(self._rows, self._waiters, clock)
        self._results = Storing(self._rows, clock, self._stored)
        self._deletions = BatchWriter("deletions writer", self._write_deletions, DELETIONS_AT_ONCE)

    async def start(self) -> list[Operation]:
        """Start writing; the operations that an earlier server left unfinished."""
        left = await self._rows.queued()
        for operation in left:
            self._waiters.add(operation)
        self._submits.start()
        self._results.start(await self._rows.last_finished_at())
        self.last_position = await self._rows.last_position()
        self._deletions.start()
        return left

    async def stop(self) -> None:
        """Write what is pending, then end."""
        for writer in (self._submits, self._results, self._deletions):
            await writer.stop()

    async def enqueue(self, operation: Operation) -> Accepted:
        """Store an operation, durably when this returns.

        The same lane and seq_id with an equal body again gives the first request_id. Raises SequenceConflict
        where the first one was another operation.
        """
        if not 0 <= operation.seq_id < 2**63:
            raise BadRequest(f"seq_id {operation.seq_id} is not between 0 and 2^63 - 1")
        return await self._submits.put(operation)

    async def note_try(self, request_id: str, number: int) -> None:
        """An operation that was left unfinished is about to be begun for the so-manieth time: durable on return."""
        await self._rows.note_try(request_id, number)

    async def forget_tries(self) -> None:
        """The server was told to stop: what is unfinished is to blame for nothing."""
        await self._rows.forget_tries()

    async def body(self, request_id: str) -> bytes:
        """Of an operation that is unfinished or in a log, as it was received."""
        return await self._rows.body(request_id)

    async def logged(self, model_id: str) -> AsyncIterator[Entry]:
        """The log of a model in order, with what is still on its way to the database."""
        await self.flush()
        after = 0
        while page := await self._rows.logged(model_id, after):
            for entry in page:
                yield entry
            after = page[-1].position

    async def past(self, lane: str, before: int | None = None) -> list[PastOperation]:
        """The operations of a lane that have ended, the largest number first: some, those below `before`."""
        return await self._rows.past(lane, before)

    async def knows(self, lane: str, seq_id: int) -> bool:
        """Whether an operation was accepted under this number."""
        return await self._rows.knows(lane, seq_id)

    def complete(self, request_id: str, result: Result, *, logged: bool = False) -> Result:
        """Store a result, and wake those who wait for it once it is stored. The first one of an operation stays.

        Returns the result that is stored. `logged`: it takes the next place in the log of its model.
        """
        operation = self._waiters.get(request_id)
        if operation is None:
            return result
        if operation.result is not None:
            return operation.result
        if (size_bytes := len(result.body)) > self._max_result_bytes:
            text = (
                f"the result has {size_bytes} bytes, and {self._max_result_bytes} can be stored; ask for less at once"
            )
            result = Result.of_error(ResultTooLarge(text))
        operation.result = replace(
            result,
            operation_kind=operation.operation_kind,
            lane=operation.lane,
            seq_id=operation.seq_id,
            owner=operation.owner,
        )
        if logged:
            self.last_position += 1
            operation.result = replace(operation.result, position=self.last_position)
        self._results.put(request_id, operation.result)
        return operation.result

    def _stored(self, request_id: str, result: Result) -> None:
        self._recent.put(request_id, result)
        self._waiters.remove(request_id)
        self.changes.note(result.owner)
        target, cursor = result.completion
        self._completions.note(target, Completion(cursor, request_id, result.failed, len(result.body)))
        self._on_stored(request_id)

    async def wait(self, request_id: str, owner: str, hold_s: float) -> Result | None:
        """The result; None where it is not there within `hold_s`. Raises UnknownFuture, ResultExpired."""
        if (operation := self._waiters.get(request_id)) is not None:
            if operation.owner != owner:
                raise _unknown(request_id)
            if not await self._waiters.hold(request_id, hold_s):
                return None
        result = self._recent.get(request_id) or await self._load(request_id, owner)
        if result is None:
            await self._waiters.hold(request_id, hold_s)
        elif result.owner != owner:
            raise _unknown(request_id)
        return result

    async def completed(self, target: Target, cursor: int, hold_s: float) -> list[Completion]:
        """Samples of one client that finished after `cursor`; held until there is one, at most `hold_s`."""
        return await self._completions.after(target, cursor, hold_s)

    def first_time_large(self, request_id: str) -> bool:
        """Whether this is the first call for this result: its size may be told once instead of it."""
        is_first = request_id not in self._announced
        self._announced.add(request_id)
        return is_first

    async def require_finished_sample(self, request_id: str, owner: str) -> None:
        """Raises UnknownFuture, or BadRequest for an operation that cannot be cancelled."""
        if (operation := self._waiters.get(request_id)) is not None and operation.owner == owner:
            if operation.result is not None:
                return
            raise BadRequest(f"{request_id} is {operation.operation_kind}; only samples can be cancelled")
        row = await self._rows.get(request_id)
        if row is None or row.owner != owner:
            raise _unknown(request_id)

    def has_unstored(self, lane: str, up_to: int | None = None) -> bool:
        """Whether a lane has a result that is not stored yet, of those up to a position in its log if one is given."""
        return self._waiters.has_unstored(lane, up_to)

    async def flush(self) -> None:
        """Returns once all results that are there are stored."""
        await self._results.flush()

    def acknowledge(self, lane: str, request_ids: list[str]) -> None:
        """The client has these results of its lane: they may go. Those that are not finished stay."""
        for start in range(0, len(request_ids), IDS_AT_ONCE):
            self._deletions.put((lane, request_ids[start : start + IDS_AT_ONCE]))

    def release(self) -> None:
        """Let all waiters go empty-handed, for the server stops."""
        self._waiters.release()
        self._completions.release()
        self.changes.release()

    async def expire(self, before: float) -> None:
        """Delete results that are older; a tombstone stays of each for a while, so that polls are told why."""
        await self._results.flush()
        self._recent.keep(lambda result: result.finished_at >= before)
        self._completions.drop_idle()
        self._announced.clear()
        await self._rows.expire(before, before - TOMBSTONES_KEPT_S)

    async def _load(self, request_id: str, owner: str) -> Result | None:
        row = await self._rows.get(request_id)
        if row is None or row.owner != owner:
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
            await self._rows.delete_results(batch)
        except DatabaseUnavailable as error:  # results that stay are deleted when their time is over
            log.debug("fetched results stay for a while: %s", error)
        except Exception:
            log.exception("the database did not delete fetched results")
        for lane, request_ids in batch:
            for request_id in request_ids:
                if (recent := self._recent.get(request_id)) is not None and recent.lane == lane:
                    self._recent.pop(request_id)


def _unknown(request_id: str) -> UnknownFuture:
    return UnknownFuture(f"no operation has the request_id {request_id!r}")
