"""Operations that an earlier server left unfinished: perhaps it ended because of one of them, with its whole machine.

Each is noted before it is begun again. Where a server ends then too, those that it had begun are begun one at a time by
the next: so the one during which that ends as well is known, and it is not tried for a third time.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.protocol import BackendFailed
from tinker_server.errors import DatabaseUnavailable
from tinker_server.store.futures import FutureStore
from tinker_server.store.operations import Operation

log = logging.getLogger(__name__)
MAX_TRIES = 2


class Suspects:
    """Says when what was left unfinished may be begun."""

    def __init__(self, futures: FutureStore) -> None:
        self._futures = futures
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def trial(self, operation: Operation) -> AsyncIterator[None]:
        """Held while an operation is carried out. Raises BackendFailed for one that was tried often enough."""
        if operation.tries is None:
            yield
            return
        if operation.tries >= MAX_TRIES:
            raise BackendFailed(
                f"the server ended {operation.tries} times while it worked again on this {operation.operation_kind},"
                " which an earlier end had left unfinished; it is not tried once more, and all else goes on"
            )
        async with self._alone if operation.tries else contextlib.nullcontext():
            await self._note(operation.request_id, operation.tries + 1)
            yield

    async def _note(self, request_id: str, number: int) -> None:
        while True:
            try:
                return await self._futures.note_try(request_id, number)
            except DatabaseUnavailable:
                log.warning("what was left unfinished waits for the database")
