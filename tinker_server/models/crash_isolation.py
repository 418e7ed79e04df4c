"""Operations that an earlier server left unfinished: perhaps it ended because of one of them, with its whole machine.

Each is noted before it is begun again. Where a server ends then too, the next begins those that were begun in a few
groups, one after the other, likewise noted: so with every end fewer remain, and the last one is not tried once more.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.protocol import BackendFailed
from tinker_server.errors import DatabaseUnavailable, Superseded
from tinker_server.store.futures.records import Operation
from tinker_server.store.futures.store import FutureStore

log = logging.getLogger(__name__)
MAX_TRIES = 2
"""At the least, before an operation is blamed."""
GROUPS = 8


class Suspects:
    """Says when what was left unfinished may be begun."""

    def __init__(self, futures: FutureStore) -> None:
        self._futures = futures
        self._groups: deque[set[str]] = deque()
        """By request_id; the first has its turn."""
        self._changed = asyncio.Event()
        self._guilty: str | None = None

    def take_up(self, left: list[Operation]) -> None:
        """What is left of an earlier server, before any of it is begun."""
        # An unload waits for its model's other operations, so it must not be waited for by them.
        tried = [one for one in left if one.tries and one.operation_kind != "unload_model"]
        tried.sort(key=lambda one: one.tries or 0, reverse=True)
        if not tried:
            return
        latest = [one for one in tried if one.tries == tried[0].tries]
        if len(latest) == 1 and (tried[0].tries or 0) >= MAX_TRIES:
            self._guilty = tried.pop(0).request_id
        size = -(-len(latest) // GROUPS)
        self._groups.extend({one.request_id for one in tried[at : at + size]} for at in range(0, len(tried), size))

    @asynccontextmanager
    async def trial(self, operation: Operation) -> AsyncIterator[None]:
        """Held while an operation is carried out. Raises BackendFailed for the one that is to blame."""
        if operation.tries is None:
            yield
            return
        if operation.request_id == self._guilty:
            raise BackendFailed(
                f"the server ended {operation.tries} times while it worked again on this {operation.operation_kind},"
                " which an earlier end had left unfinished; it is not tried once more, and all else goes on"
            )
        try:
            while any(operation.request_id in group for group in list(self._groups)[1:]):
                await self._changed.wait()
            await self._note(operation.request_id, operation.tries + 1)
            yield
        finally:
            self.forget(operation.request_id)

    def forget(self, request_id: str) -> None:
        """It has ended, or will not be begun."""
        for group in self._groups:
            group.discard(request_id)
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _note(self, request_id: str, number: int) -> None:
        while True:
            try:
                return await self._futures.rows.note_try(request_id, number)
            except Superseded:
                raise  # for good
            except DatabaseUnavailable:
                log.warning("what was left unfinished waits for the database")
