"""Isolate the operations that an earlier server left unfinished: one of them may have ended it, with its whole machine.

Each attempt is noted durably before it begins. If a server ends again, the next one runs the operations that had begun
in groups: so each crash leaves fewer suspects, and the last one is not tried again.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from tinker_server.backends.processes.crash_isolation import CrashIsolation, Suspect
from tinker_server.backends.protocol import BackendFailed
from tinker_server.errors import DatabaseUnavailable, Superseded
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.store import FutureStore

log = logging.getLogger(__name__)
MAX_TRIES = 2
"""Attempts under which servers must have ended before an operation is the culprit."""


class LeftOperations:
    """Decides when an operation that was left unfinished may begin."""

    def __init__(self, futures: FutureStore) -> None:
        self._futures = futures
        self._isolation = CrashIsolation(is_exclusive=False)
        self._suspects: dict[str, Suspect] = {}
        """By request_id."""

    def isolate(self, left: list[Operation]) -> None:
        """Group what an earlier server left, before any of it begins."""
        # An unload waits for its model's other operations, so it must not be waited for by them.
        tried = [operation for operation in left if operation.tries and operation.operation_kind != "unload_model"]
        tried.sort(key=lambda operation: operation.tries or 0, reverse=True)
        suspects = [self._suspects.setdefault(operation.request_id, Suspect()) for operation in tried]
        num_latest = sum(operation.tries == tried[0].tries for operation in tried)
        if num_latest == 1 and (tried[0].tries or 0) >= MAX_TRIES:
            suspects.pop(0).is_culprit = True
        self._isolation.isolate(suspects, num_latest)

    @asynccontextmanager
    async def attempt(self, operation: Operation) -> AsyncIterator[None]:
        """Admit an operation that was left unfinished, and hold while it runs. Raises BackendFailed for the culprit."""
        assert operation.tries is not None, "it was left unfinished"
        suspect = self._suspects.get(operation.request_id) or Suspect()
        if suspect.is_culprit:
            raise BackendFailed(
                f"the server ended {operation.tries} times while it worked again on this {operation.operation_kind},"
                " which an earlier end had left unfinished; it is not tried once more, and all else goes on"
            )
        try:
            note = partial(self._note, operation.request_id, operation.tries + 1)
            async with self._isolation.admit(suspect, note):
                yield
        finally:
            self.release(operation.request_id)

    def release(self, request_id: str, _: Result | None = None) -> None:
        """Forget an operation that has ended, or will not begin."""
        if (suspect := self._suspects.pop(request_id, None)) is not None:
            self._isolation.release(suspect)

    async def _note(self, request_id: str, number: int) -> None:
        while True:
            try:
                return await self._futures.rows.note_try(request_id, number)
            except Superseded:
                raise  # for good
            except DatabaseUnavailable:
                log.warning("unfinished operations of the last server wait for the database")
