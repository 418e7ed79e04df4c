"""Storing results: each until it is stored, and none that cannot be stored in the way of the others."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from tinker_server.errors import DatabaseUnavailable, ResultTooLarge
from tinker_server.store.futures.batch_writer import BatchWriter
from tinker_server.store.futures.results import Result
from tinker_server.store.futures.rows import FutureRows

log = logging.getLogger(__name__)
AT_ONCE = 1000
RETRY_S = 1.0
"""Pause after the database refused results, before they are offered again."""


class Storing:
    """What waits to be stored; `stored` is told of each that is."""

    def __init__(self, rows: FutureRows, clock: Callable[[], float], stored: Callable[[str, Result], None]) -> None:
        self._rows = rows
        self._clock = clock
        self._stored = stored
        self._last_finished_us = 0
        self._writer: BatchWriter[tuple[str, Result]] = BatchWriter("results writer", self._write, AT_ONCE)
        self.flush = self._writer.flush
        self.stop = self._writer.stop

    def start(self, last_finished_at: float) -> None:
        """Results from here on are later than those of earlier servers, whatever the clock says."""
        self._last_finished_us = round(last_finished_at * 1e6)
        self._writer.start()

    def put(self, request_id: str, result: Result) -> None:
        """Have a result stored."""
        self._writer.put((request_id, result))

    async def _write(self, batch: list[tuple[str, Result]]) -> None:
        """Until all are stored, or the server stops while the database takes nothing."""
        while True:
            try:
                await self._store(batch)
                return
            except DatabaseUnavailable as error:
                log.debug("%d results wait to be stored: %s", len(batch), error)
            except Exception:
                log.exception("the database did not take %d results", len(batch))
                batch = [pair for pair in batch if not await self._store_alone(*pair)]
            if not batch or self._writer.is_stopping:
                return
            await asyncio.sleep(RETRY_S)

    async def _store_alone(self, request_id: str, result: Result) -> bool:
        """Store one result, or in place of one that cannot be stored that it could not."""
        try:
            await self._store([(request_id, result)])
        except DatabaseUnavailable:
            return False
        except Exception:  # noqa: BLE001 - told apart by trying it again
            failed = Result.of_error(ResultTooLarge(f"the result of {len(result.body)} bytes could not be stored"))
            kind, lane, seq_id, owner = result.operation_kind, result.lane, result.seq_id, result.owner
            failed = replace(failed, operation_kind=kind, lane=lane, seq_id=seq_id, owner=owner)
            failed = replace(failed, position=result.position)  # it changed its model all the same
            try:
                await self._store([(request_id, failed)])
            except Exception:  # then it is the database, not the result
                log.exception("the database takes no results")
                return False
        return True

    async def _store(self, batch: list[tuple[str, Result]]) -> None:
        stamped = [(request_id, self._stamp(result)) for request_id, result in batch]
        await self._rows.finish(stamped)
        for request_id, result in stamped:
            self._stored(request_id, result)

    def _stamp(self, result: Result) -> Result:
        """With the microsecond it finished in, later than all before: cursors of logs are made of it."""
        self._last_finished_us = max(round(self._clock() * 1e6), self._last_finished_us + 1)
        return replace(result, finished_at=self._last_finished_us / 1e6)
