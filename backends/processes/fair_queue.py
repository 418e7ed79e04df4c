"""Fair queue: round-robin over owners, then over the keys of an owner, then first in, first out."""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

REMEMBERED = 10_000
"""Owners and keys whose latest grant is remembered; all others count as never served."""


@dataclass
class _Queue:
    """Requests that wait under an owner and key."""

    owner: str
    key: str
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)


class FairQueue:
    """Grants `capacity` units of something to whoever was served longest ago: first among owners, then among keys.

    A flood of an owner delays another's request by no more than one grant, and the same holds between keys. What waits
    for its own owner's grants delays nobody.
    """

    def __init__(self, capacity: int = 1) -> None:
        self._capacity = capacity
        self._free = capacity
        self._held: Counter[str] = Counter()
        """Units that an owner holds."""
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._served: dict[tuple[str, ...], int] = {}
        """Number of the latest grant of an owner, and of an owner's key."""
        self._prioritized: set[tuple[str, str]] = set()
        """Owners and keys that go before all others."""
        self._count = itertools.count(1)
        self._ended_s = time.monotonic()
        """Time of the latest end of a grant, or of a priority."""

    @asynccontextmanager
    async def grant(self, owner: str, key: str, size: int = 1) -> AsyncIterator[Callable[[int], None]]:
        """Hold `size` units while the block runs, or all of them if there are fewer. The block is given a function that
        releases all but so many of them earlier."""
        size = min(size, self._capacity)

        def shrink(enough: int) -> None:
            nonlocal size
            released, size = max(0, size - enough), min(size, enough)
            self._free += released
            self._held[owner] -= released
            if self._queues:
                self._admit()

        if size <= self._free and not self._queues and not self._prioritized:
            self._take(owner, key, size)  # as it would in a queue of its own
        else:
            await self._wait(owner, key, size)
        try:
            yield shrink
        finally:
            self._release(owner, size)

    @contextmanager
    def prioritize(self, owner: str, key: str) -> Iterator[None]:
        """Grant nothing to others while the block runs, even if nothing waits under this owner and key. Several that
        are prioritized share as all do."""
        self._prioritized.add((owner, key))
        try:
            yield
        finally:
            self._prioritized.discard((owner, key))
            self._release(owner, 0)

    @property
    def idle_s(self) -> float:
        """Seconds for which nothing has been granted, waited, or had priority; 0 while something does."""
        if self._free < self._capacity or self._queues or self._prioritized:
            return 0.0
        return time.monotonic() - self._ended_s

    def priority(self, owner: str, key: str) -> tuple[bool, int, int]:
        """Return a value that is least for whoever is next."""
        is_later = (owner, key) not in self._prioritized
        return is_later, self._served.get((owner,), 0), self._served.get((owner, key), 0)

    async def _wait(self, owner: str, key: str, size: int) -> None:
        """Wait for a grant, behind all who are next."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault((owner, key), _Queue(owner, key))
        queue.waiting.append((granted, size))
        self._admit()
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self._release(owner, size)
            else:
                self._leave(queue, granted)
                self._admit()
            raise

    def _release(self, owner: str, size: int) -> None:
        self._free += size
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
        self._ended_s = time.monotonic()
        if self._queues:
            self._admit()

    def _leave(self, queue: _Queue, granted: asyncio.Future[None]) -> None:
        """Remove a request that ends before its grant."""
        kept = deque(entry for entry in queue.waiting if entry[0] is not granted)
        if len(kept) < len(queue.waiting):
            queue.waiting = kept
            self._remove_if_empty(queue)

    def _admit(self) -> None:
        """Grant while there is room for the next request."""
        while (queue := self._next()) is not None:
            granted, size = queue.waiting.popleft()
            self._remove_if_empty(queue)
            if granted.cancelled():
                continue
            self._take(queue.owner, queue.key, size)
            granted.set_result(None)

    def _next(self) -> _Queue | None:
        """Return whose request is granted next; None if there is no room for it. Smaller requests do not overtake a
        larger request, unless that has no room beside what its owner holds."""
        queues = list(self._queues.values())
        if self._prioritized:
            queues = [queue for queue in queues if (queue.owner, queue.key) in self._prioritized]
        while queues:
            first = min(queues, key=lambda queue: self.priority(queue.owner, queue.key))
            if first.waiting[0][1] <= self._free:
                return first
            if first.waiting[0][1] + self._held[first.owner] <= self._capacity:
                break
            queues = [queue for queue in queues if queue.owner != first.owner]
        return None

    def _remove_if_empty(self, queue: _Queue) -> None:
        if not queue.waiting:
            self._queues.pop((queue.owner, queue.key), None)

    def _take(self, owner: str, key: str, size: int) -> None:
        self._free -= size
        self._held[owner] += size
        number = next(self._count)
        for name in ((owner,), (owner, key)):
            self._served.pop(name, None)  # so that the oldest come first
            self._served[name] = number
        while len(self._served) > REMEMBERED:
            del self._served[next(iter(self._served))]
