"""Accepting operations: each is one row, whatever becomes of the connection, and however often it is sent."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from tinker_server.errors import DatabaseUnavailable
from tinker_server.store.futures.batch_writer import BatchWriter
from tinker_server.store.futures.records import Accepted, Operation
from tinker_server.store.futures.rows import First, FutureRows
from tinker_server.store.futures.waiters import Waiters

log = logging.getLogger(__name__)
AT_ONCE = 1000

Submit = tuple[Operation, asyncio.Future[Accepted]]


class Submits:
    """What waits to be accepted."""

    def __init__(self, rows: FutureRows, waiters: Waiters, clock: Callable[[], float]) -> None:
        self._rows = rows
        self._waiters = waiters
        self._clock = clock
        self._writer: BatchWriter[Submit] = BatchWriter("submits writer", self._write, AT_ONCE)
        self.start = self._writer.start
        self.stop = self._writer.stop

    async def put(self, operation: Operation) -> Accepted:
        """Store an operation, durably when this returns. Raises SequenceConflict, and whatever the database raises."""
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._waiters.add(operation)
        self._writer.put((operation, accepted))
        first = None
        try:
            first = await accepted
        finally:
            if first is None or first.request_id != operation.request_id:
                self._waiters.remove(operation.request_id)
        return first

    async def _write(self, batch: list[Submit]) -> None:
        try:
            outcomes = await self._insert_surely(batch)
        except DatabaseUnavailable as error:
            log.debug("%d operations are refused: %s", len(batch), error)
            outcomes = [error] * len(batch)
        except Exception as error:  # one bad moment of the database must not end the server
            log.exception("the database did not take %d operations", len(batch))
            if len(batch) > 1:
                for submit in batch:
                    await self._write([submit])
                return
            outcomes = [error] * len(batch)
        for (_, accepted), outcome in zip(batch, outcomes, strict=True):
            if accepted.done():
                continue
            if isinstance(outcome, Exception):
                accepted.set_exception(outcome)
            else:
                accepted.set_result(outcome)

    async def _insert_surely(self, batch: list[Submit]) -> list[Accepted | Exception]:
        try:
            return await self._insert(batch)
        except DatabaseUnavailable:
            # A connection that was lost at its commit does not say whether the rows are there; this does.
            return await self._insert(batch)

    async def _insert(self, batch: list[Submit]) -> list[Accepted | Exception]:
        firsts = await self._rows.insert([operation for operation, _ in batch], self._clock())
        # Nothing is awaited from here on, so that no result is stored between the look and its consequence.
        return [
            self._accept(operation, first) if isinstance(first, First) else first
            for (operation, _), first in zip(batch, firsts, strict=True)
        ]

    def _accept(self, operation: Operation, first: First) -> Accepted:
        """A row that waits and that nobody here knows of was stored by a commit that seemed to fail: it is adopted."""
        if first.request_id == operation.request_id:
            return Accepted(first.request_id, is_new=True)
        is_new = first.is_queued and self._waiters.get(first.request_id) is None
        if is_new:
            self._waiters.add(replace(operation, request_id=first.request_id))
        return Accepted(first.request_id, is_new)
