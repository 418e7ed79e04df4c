"""Turns on what can serve few at once: by owner, then by the owner's queues, and within a queue in order of arrival."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

REMEMBERED = 10_000
"""Owners and queues whose last turn is remembered; who is forgotten counts as never served."""


@dataclass
class _Queue:
    """Those who wait under one owner and key."""

    owner: str
    key: str
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)


class FairTurns:
    """`capacity` units of something. Who was served longest ago comes next: first among owners, then among their keys.

    So a flood of one owner delays another's request by no more than one turn, and the same holds between keys.
    """

    def __init__(self, capacity: int = 1) -> None:
        self._capacity = capacity
        self._free = capacity
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._served: dict[tuple[str, ...], int] = {}
        """When an owner, and an owner's key, had its last turn."""
        self._first: set[tuple[str, str]] = set()
        """Owner and key of the queues that go before all others."""
        self._count = itertools.count(1)

    @asynccontextmanager
    async def turn(self, owner: str, key: str, size: int = 1) -> AsyncIterator[Callable[[int], None]]:
        """Hold `size` units, all of them where there are fewer, while the block runs, or until it says that so many
        are enough."""
        size = min(size, self._capacity)

        def shrink(enough: int) -> None:
            nonlocal size
            self._free += max(0, size - enough)
            size = min(size, enough)
            self._grant()

        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault((owner, key), _Queue(owner, key))
        queue.waiting.append((granted, size))
        self._grant()
        try:
            await granted
            yield shrink
        finally:
            if granted.done() and not granted.cancelled():
                self._free += size
            else:
                self._leave(queue, granted)
            self._grant()

    @contextmanager
    def first(self, owner: str, key: str) -> Iterator[None]:
        """While the block runs, this queue goes before all others. They get no turn between two of its own either,
        when nothing waits in it. Several such queues take turns."""
        self._first.add((owner, key))
        try:
            yield
        finally:
            self._first.discard((owner, key))
            self._grant()

    def standing(self, owner: str, key: str) -> tuple[bool, int, int]:
        """Who has the smallest is next."""
        is_later = (owner, key) not in self._first
        return is_later, self._served.get((owner,), 0), self._served.get((owner, key), 0)

    def _leave(self, queue: _Queue, granted: asyncio.Future[None]) -> None:
        """One who waited is gone without a turn."""
        kept = deque(entry for entry in queue.waiting if entry[0] is not granted)
        if len(kept) < len(queue.waiting):
            queue.waiting = kept
            self._drop_if_empty(queue)

    def _grant(self) -> None:
        """Give turns while there is room for the next in line; a large one is waited for, not passed over."""
        while (queue := self._next()) is not None:
            granted, size = queue.waiting[0]
            if size > self._free:
                return
            queue.waiting.popleft()
            self._drop_if_empty(queue)
            if granted.cancelled():
                continue
            self._free -= size
            self._note(queue)
            granted.set_result(None)

    def _next(self) -> _Queue | None:
        queues = list(self._queues.values())
        if self._first:
            queues = [one for one in queues if (one.owner, one.key) in self._first]
        return min(queues, key=lambda one: self.standing(one.owner, one.key), default=None)

    def _drop_if_empty(self, queue: _Queue) -> None:
        if not queue.waiting:
            self._queues.pop((queue.owner, queue.key), None)

    def _note(self, queue: _Queue) -> None:
        number = next(self._count)
        for name in ((queue.owner,), (queue.owner, queue.key)):
            self._served.pop(name, None)  # so that the oldest come first
            self._served[name] = number
        while len(self._served) > REMEMBERED:
            del self._served[next(iter(self._served))]
