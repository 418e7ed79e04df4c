"""Logs of finished samples, one per target: a sampling session and one of the clients that share it.

A log starts when a client first asks for it, from the database, and grows as samples finish. Entries are
named by their cursor, which is the time they finished at, in microseconds, no two the same: so a log that
was trimmed, dropped, or lost with an earlier server can be made again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

CLIENT_SPAN = 10**9
"""The SDK numbers the samples of client k of a sampling session from k times this."""
IDLE_S = 600
"""A log nobody asked for in this time is dropped."""


class Target(NamedTuple):
    lane: str
    """The sampling session."""
    client: int

    @classmethod
    def of(cls, lane: str, seq_id: int) -> "Target":
        """Whose sample it is: every client of a session has a span of numbers of its own."""
        return cls(lane, seq_id // CLIENT_SPAN)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample."""

    cursor: int
    request_id: str
    failed: bool
    size_bytes: int
    """Of the result."""


class _Log:
    def __init__(self) -> None:
        self.entries: dict[str, Completion] = {}
        """By request_id, in order of their cursors."""
        self.trimmed_to = 0
        self.grown = asyncio.Event()
        self.asked_at = time.monotonic()
        self.loading: asyncio.Task[None] | None = None

    def add(self, completions: list[Completion]) -> None:
        merged = {one.request_id: one for one in completions} | self.entries
        self.entries = {one.request_id: one for one in sorted(merged.values(), key=lambda one: one.cursor)}
        self.grown.set()

    def append(self, completion: Completion) -> None:
        self.entries[completion.request_id] = completion
        self.grown.set()

    def trim(self, cursor: int) -> None:
        """Forget entries up to `cursor`, which the client has seen."""
        seen = []
        for one in self.entries.values():
            if one.cursor > cursor:
                break
            seen.append(one.request_id)
        for request_id in seen:
            del self.entries[request_id]
        self.trimmed_to = max(self.trimmed_to, cursor)


class Completions:
    """The logs that clients ask for. `load` reads what has finished for a target, from the first on."""

    def __init__(self, load: Callable[[Target], Awaitable[list[Completion]]]) -> None:
        self._load = load
        self._logs: dict[Target, _Log] = {}

    def note(self, target: Target, completion: Completion) -> None:
        """A sample has finished. Cursors come in rising order."""
        if (log := self._logs.get(target)) is not None:
            log.append(completion)

    async def after(self, target: Target, cursor: int, hold_s: float) -> list[Completion]:
        """What finished after `cursor`, as soon as there is anything; nothing where nothing did within `hold_s`."""
        log = await self._log(target, cursor)
        log.trim(cursor)
        log.grown.clear()
        if not log.entries and hold_s > 0:
            try:
                async with asyncio.timeout(hold_s):
                    await log.grown.wait()
            except TimeoutError:
                pass
        log.asked_at = time.monotonic()
        return [one for one in log.entries.values() if one.cursor > cursor]

    def release(self) -> None:
        """Let all who wait go with what there is."""
        for log in self._logs.values():
            log.grown.set()

    def drop_idle(self) -> None:
        """Forget the logs that nobody asks for any more."""
        before = time.monotonic() - IDLE_S
        self._logs = {target: log for target, log in self._logs.items() if log.asked_at > before}

    async def _log(self, target: Target, cursor: int) -> _Log:
        log = self._logs.get(target)
        if log is None or cursor < log.trimmed_to:
            # Known before it is loaded, so that it misses nothing that finishes meanwhile.
            log = self._logs[target] = _Log()
            log.loading = asyncio.create_task(self._fill(target, log))
        if log.loading is not None:
            await asyncio.shield(log.loading)
        return log

    async def _fill(self, target: Target, log: _Log) -> None:
        try:
            log.add(await self._load(target))
        except BaseException:
            self._logs.pop(target, None)
            raise
        log.loading = None
