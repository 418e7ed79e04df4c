"""A writer in batches: items that arrive during a commit go into the next, so that hundreds cost a few commits."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BatchWriter(Generic[T]):
    """A task that passes the items that have arrived to `write`, which must not raise."""

    def __init__(self, name: str, write: Callable[[list[T]], Awaitable[None]], max_batch: int) -> None:
        self._name = name
        self._write = write
        self._max_batch = max_batch
        self._arrived: deque[T] = deque()
        self._num_arrived = 0
        self._num_written = 0
        self._wake = asyncio.Event()
        self._progress = asyncio.Condition()
        self.is_stopping = False
        """True once `write` should give up what it cannot write now."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start writing."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    def put(self, *items: T) -> None:
        """Queue items to be written soon, in order of arrival."""
        self._arrived += items
        self._num_arrived += len(items)
        self._wake.set()

    async def flush(self) -> None:
        """Return once all items that have arrived so far are written, whatever arrives meanwhile."""
        until = self._num_arrived
        async with self._progress:
            await self._progress.wait_for(lambda: self._num_written >= until or self._ended)

    async def stop(self) -> None:
        """Write the items that have arrived, then end."""
        self.is_stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task

    @property
    def _ended(self) -> bool:
        return self._task is None or self._task.done()

    async def _run(self) -> None:
        while not self.is_stopping or self._arrived:
            await self._wake.wait()
            batch = [self._arrived.popleft() for _ in range(min(len(self._arrived), self._max_batch))]
            if not self._arrived and not self.is_stopping:
                self._wake.clear()
            if batch:
                await self._write(batch)
                async with self._progress:
                    self._num_written += len(batch)
                    self._progress.notify_all()
