"""Operations from their submit until their results are stored.

Submits and results are committed apart, each in batches. An operation is a row, whatever becomes of
the connection and however often it is sent. A result is offered to the database until it is stored; one that cannot be
stored does not hold up the others.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tinker_server.errors import BadRequest, DatabaseUnavailable, ResultTooLarge
from tinker_server.store.futures.batch_writer import BatchWriter
from tinker_server.store.futures.observers import Observers, notify
from tinker_server.store.futures.records import Accepted, Operation, Result
from tinker_server.store.futures.rows import First, FutureRows

log = logging.getLogger(__name__)
MAX_BATCH = 1000
"""Submits, or results, in a transaction."""
RETRY_S = 1.0
"""Pause before results that the database refused are offered again."""
RELEASED_HOLD_S = 1.0
"""Seconds that a poll is held while the server stops: answered at once, its client would ask again at once."""

Submit = tuple[Operation, asyncio.Future[Accepted]]


@dataclass(slots=True)
class Unfinished:
    """An accepted operation whose result is not stored yet."""

    operation_kind: str
    lane: str
    seq_id: int
    owner: str
    answer_bytes: int = 0
    result: Result | None = None
    """The result while it is on its way to the database."""
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class FutureQueue:
    """The unfinished operations by request_id, and the polls that wait for them."""

    def __init__(
        self,
        rows: FutureRows,
        clock: Callable[[], float],
        max_result_bytes: int,
        observers: Observers,
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._max_result_bytes = max_result_bytes
        self._observers = observers
        self._unfinished: dict[str, Unfinished] = {}
        self._released = asyncio.Event()
        """Set when the server stops, and no poll waits any more."""
        self._submits: BatchWriter[Submit] = BatchWriter("submits writer", self._write_submits, MAX_BATCH)
        self._results: BatchWriter[tuple[str, Result]] = BatchWriter("results writer", self._write_results, MAX_BATCH)
        self._last_finished_us = 0
        self.last_position = 0
        """The largest position in a log that was given."""
        self.stored_bytes: Counter[str] = Counter()
        """By owner, bytes of bodies, results and metrics that were stored since the server started."""
        self.due_bytes: Counter[str] = Counter()
        """By owner, bytes of results that accepted operations will have."""
        self.flush = self._results.flush
        """Return once all results that have arrived are stored."""

    async def start(self) -> list[Operation]:
        """Start writing; return the operations that an earlier server left unfinished."""
        left = await self._rows.read_queue()
        for operation in left:
            self._add(operation)
            notify(self._observers.accepted, operation)
        self.last_position = await self._rows.last_position()
        # Results from here on are later than those of earlier servers, whatever the clock says.
        self._last_finished_us = round(await self._rows.last_finished_at() * 1e6)
        self._submits.start()
        self._results.start()
        return left

    async def stop(self) -> None:
        """Write what is pending, then end."""
        await self._submits.stop()
        await self._results.stop()

    async def enqueue(self, operation: Operation) -> Accepted:
        """Store an operation, durably when this returns.

        The same lane and seq_id with an equal body again gives the first request_id. Raises BadRequest,
        SequenceConflict if the first was another operation, and whatever the database raises.
        """
        if not 0 <= operation.seq_id < 2**63:
            raise BadRequest(f"seq_id {operation.seq_id} is not between 0 and 2^63 - 1")
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._add(operation)
        self._submits.put((operation, accepted))
        first = None
        try:
            first = await accepted
        finally:
            if first is None or first.request_id != operation.request_id:
                self._remove(operation.request_id)
        if first.is_new:
            notify(self._observers.accepted, replace(operation, request_id=first.request_id))
        return first

    def complete(self, request_id: str, result: Result, *, logged: bool = False) -> Result:
        """Store a result, and wake its polls once it is stored; return the operation's first result, which stays.

        `logged`: it takes the next position in the log of its model.
        """
        operation = self._unfinished.get(request_id)
        if operation is None:
            return result
        if operation.result is not None:
            return operation.result
        if (size_bytes := len(result.body)) > self._max_result_bytes:
            text = (
                f"the result has {size_bytes} bytes, and {self._max_result_bytes} can be stored; ask for less at once"
            )
            result = Result.of_error(ResultTooLarge(text))
        if logged:
            self.last_position += 1
        operation.result = replace(
            result,
            operation_kind=operation.operation_kind,
            lane=operation.lane,
            seq_id=operation.seq_id,
            owner=operation.owner,
            position=self.last_position if logged else None,
        )
        notify(self._observers.ended, request_id, operation.result)
        self._results.put((request_id, operation.result))
        return operation.result

    def get(self, request_id: str) -> Unfinished | None:
        """Return an unfinished operation; None if its result is stored or it was never accepted."""
        return self._unfinished.get(request_id)

    async def hold(self, request_id: str, hold_s: float) -> bool:
        """Wait until a result is stored, at most `hold_s`; return whether it may be there now."""
        unfinished = self._unfinished.get(request_id)
        if self._released.is_set():
            await asyncio.sleep(min(hold_s, RELEASED_HOLD_S))
        event = self._released if unfinished is None else unfinished.stored
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await event.wait()
        return request_id not in self._unfinished

    def has_unstored(self, lane: str, up_to: int | None = None) -> bool:
        """Return whether a lane has a result that is not stored yet, up to a position in its log if given."""
        results = (operation.result for operation in self._unfinished.values() if operation.lane == lane)
        return any(result is not None and (up_to is None or (result.position or 0) <= up_to) for result in results)

    def release(self) -> None:
        """Let all polls go empty-handed, since the server stops."""
        self._released.set()
        for unfinished in self._unfinished.values():
            unfinished.stored.set()

    def _add(self, operation: Operation) -> None:
        self.due_bytes[operation.owner] += operation.answer_bytes
        self._unfinished[operation.request_id] = Unfinished(
            operation.operation_kind, operation.lane, operation.seq_id, operation.owner, operation.answer_bytes
        )

    def _remove(self, request_id: str) -> None:
        """Wake the polls of an operation whose result is stored, or that was not accepted."""
        if (unfinished := self._unfinished.pop(request_id, None)) is not None:
            unfinished.stored.set()
            self.due_bytes[unfinished.owner] -= unfinished.answer_bytes

    async def _write_submits(self, batch: list[Submit]) -> None:
        try:
            try:
                outcomes = await self._insert(batch)
            except DatabaseUnavailable:
                # A connection that was lost at its commit does not say whether the rows are there; this does.
                outcomes = await self._insert(batch)
        except DatabaseUnavailable as error:
            log.debug("%d operations are refused: %s", len(batch), error)
            outcomes = [error] * len(batch)
        except Exception as error:  # a single failure of the database must not end the server
            log.exception("failed to store %d operations", len(batch))
            if len(batch) > 1:
                for submit in batch:
                    await self._write_submits([submit])
                return
            outcomes = [error]
        for (_, accepted), outcome in zip(batch, outcomes, strict=True):
            if accepted.done():
                continue
            if isinstance(outcome, Exception):
                accepted.set_exception(outcome)
            else:
                accepted.set_result(outcome)

    async def _insert(self, batch: list[Submit]) -> list[Accepted | Exception]:
        firsts = await self._rows.insert([operation for operation, _ in batch], self._clock())
        # Nothing is awaited from here on, so that no result is stored between the look and its consequence.
        return [
            self._accept(operation, first) if isinstance(first, First) else first
            for (operation, _), first in zip(batch, firsts, strict=True)
        ]

    def _accept(self, operation: Operation, first: First) -> Accepted:
        """Answer a submit. A queued row that is unknown here was stored by a commit that seemed to fail: adopt it."""
        if first.request_id == operation.request_id:
            self.stored_bytes[operation.owner] += operation.size_bytes
            return Accepted(first.request_id, is_new=True)
        is_new = first.is_queued and first.request_id not in self._unfinished
        if is_new:
            self._add(replace(operation, request_id=first.request_id))
        return Accepted(first.request_id, is_new)

    async def _write_results(self, batch: list[tuple[str, Result]]) -> None:
        """Retry until all are stored, or the server stops while the database takes nothing."""
        while True:
            try:
                await self._store(batch)
                return
            except DatabaseUnavailable as error:
                log.debug("%d results wait to be stored: %s", len(batch), error)
            except Exception:
                log.exception("failed to store %d results", len(batch))
                batch = [pair for pair in batch if not await self._store_alone(*pair)]
            if not batch or self._results.is_stopping:
                return
            await asyncio.sleep(RETRY_S)

    async def _store_alone(self, request_id: str, result: Result) -> bool:
        """Store a result, or, if it cannot be stored, an error in its place; return whether that was done."""
        try:
            await self._store([(request_id, result)])
        except DatabaseUnavailable:
            return False
        except Exception:  # noqa: BLE001 - the second try tells whose fault it is
            error = Result.of_error(ResultTooLarge(f"the result of {len(result.body)} bytes could not be stored"))
            failed = replace(
                result,  # with its position: it changed its model all the same
                body=error.body,
                content_type=error.content_type,
                failed=True,
                failure_category=error.failure_category,
                step=None,
            )
            try:
                await self._store([(request_id, failed)])
            except Exception:  # then it is the database, not the result
                log.exception("failed to store results")
                return False
        return True

    async def _store(self, batch: list[tuple[str, Result]]) -> None:
        stamped = [(request_id, self._stamp(result)) for request_id, result in batch]
        await self._rows.finish(stamped)
        for request_id, result in stamped:
            self.stored_bytes[result.owner] += len(result.body)
            self._remove(request_id)
            notify(self._observers.stored, request_id, result)

    def _stamp(self, result: Result) -> Result:
        """Set the microsecond it finished in, later than all before: cursors of completion logs are made of it."""
        self._last_finished_us = max(round(self._clock() * 1e6), self._last_finished_us + 1)
        return replace(result, finished_at=self._last_finished_us / 1e6)
