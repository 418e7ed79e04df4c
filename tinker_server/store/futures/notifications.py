"""Notifications of finished operations: logs of finished samples for clients, and changes for open dashboard pages.

A completion log is of one target: a sampling session and one of the clients that share it. It starts when a client
first asks for it, from the database, and grows as samples finish. An entry's cursor is the time it finished at, in
microseconds, no two the same. So a log that was trimmed, evicted, or lost with an earlier server can be made again.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tinker_server.store.futures.records import Result

CLIENT_SPAN = 10**9
"""The SDK numbers the samples of client k of a sampling session from k times this."""
IDLE_S = 600
"""A log that nobody asked for in this time is evicted."""


class Target(NamedTuple):
    """A client of a sampling session. Each has a span of numbers of its own."""

    lane: str
    """The sampling session."""
    client: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample."""

    cursor: int
    request_id: str
    failed: bool
    size_bytes: int
    """Bytes of the result."""


class _Log:
    def __init__(self) -> None:
        self.entries: dict[str, Completion] = {}
        """By request_id, in order of their cursors."""
        self.trimmed_to = 0
        self.grown = asyncio.Event()
        self.asked_at = time.monotonic()
        self.loading: asyncio.Task[None] | None = None

    def add(self, completions: list[Completion]) -> None:
        merged = {completion.request_id: completion for completion in completions} | self.entries
        self.entries = {entry.request_id: entry for entry in sorted(merged.values(), key=lambda entry: entry.cursor)}
        self.grown.set()

    def append(self, completion: Completion) -> None:
        self.entries[completion.request_id] = completion
        self.grown.set()

    def trim(self, cursor: int) -> None:
        """Delete entries up to `cursor`, which the client has seen."""
        seen = []
        for entry in self.entries.values():
            if entry.cursor > cursor:
                break
            seen.append(entry.request_id)
        for request_id in seen:
            del self.entries[request_id]
        self.trimmed_to = max(self.trimmed_to, cursor)


class Completions:
    """The logs that clients ask for. `load` reads a target's finished samples, from the first on."""

    def __init__(self, load: Callable[[Target], Awaitable[list[Completion]]]) -> None:
        self._load = load
        self._logs: dict[Target, _Log] = {}

    def note(self, request_id: str, result: Result) -> None:
        """Add a finished sample to its log, if any. Samples come in the order of `finished_at`."""
        if (log := self._logs.get(Target(result.lane, result.seq_id // CLIENT_SPAN))) is not None:
            cursor = round(result.finished_at * 1e6)
            log.append(Completion(cursor, request_id, result.failed, len(result.body)))

    async def after(self, target: Target, cursor: int, hold_s: float) -> list[Completion]:
        """Return the samples that finished after `cursor`, once there is any, or none if `hold_s` is over before."""
        log = await self._log(target, cursor)
        log.trim(cursor)
        log.grown.clear()
        if not log.entries and hold_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_s):
                    await log.grown.wait()
        log.asked_at = time.monotonic()
        return [entry for entry in log.entries.values() if entry.cursor > cursor]

    def release(self) -> None:
        """Let all who wait go with what there is."""
        for log in self._logs.values():
            log.grown.set()

    def evict_idle(self) -> None:
        """Evict the logs that nobody asks for any more."""
        before = time.monotonic() - IDLE_S
        self._logs = {target: log for target, log in self._logs.items() if log.asked_at > before}

    async def _log(self, target: Target, cursor: int) -> _Log:
        log = self._logs.get(target)
        if log is None or cursor < log.trimmed_to:
            # It is known before it is loaded, so that it misses nothing that finishes meanwhile.
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


class Watch:
    """An open page that waits for changes."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Wake the page: something has changed."""
        self._changed.set()

    async def next(self, timeout_s: float) -> bool:
        """Return whether anything has changed since the last call, once it has or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        changed = self._changed.is_set()
        self._changed.clear()
        return changed


class Changes:
    """The open pages by owner. They are woken when something changes; of earlier changes the last time is known."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}
        self._changed_at: dict[str, float] = {}
        self._started_at = time.time()
        self.is_released = False
        """The server stops, and nobody waits any more."""

    def note(self, owner: str) -> None:
        """Wake an owner's pages: something of theirs has changed."""
        self._changed_at[owner] = time.time()
        for watch in self._watches.get(owner, ()):
            watch.note()

    def num_watching(self, owner: str) -> int:
        """Return how many of an owner's pages are open."""
        return len(self._watches.get(owner, ()))

    @contextlib.contextmanager
    def watching(self, owner: str, since: float = math.inf) -> Iterator[Watch]:
        """Watch an owner's changes while the block runs, and those from `since` on, in seconds since 1970.

        What an earlier server changed is not known, so it counts as a change.
        """
        watch = Watch()
        if self._changed_at.get(owner, self._started_at) >= since:
            watch.note()
        self._watches.setdefault(owner, set()).add(watch)
        try:
            yield watch
        finally:
            self._watches[owner].discard(watch)
            if not self._watches[owner]:
                del self._watches[owner]

    def release(self) -> None:
        """Let all go."""
        self.is_released = True
        for watches in self._watches.values():
            for watch in watches:
                watch.note()
