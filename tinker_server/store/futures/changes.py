"""Who is told that something of an owner's has changed: pages that are open. Nothing is kept for those that are not."""

import asyncio
import contextlib
from collections.abc import Iterator


class Watch:
    """One who waits for changes."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Something has changed."""
        self._changed.set()

    async def next(self, timeout_s: float) -> bool:
        """Whether anything has changed since the last time; held until it has, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        changed = self._changed.is_set()
        self._changed.clear()
        return changed


class Changes:
    """By owner, those who wait."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}
        self.is_released = False
        """The server stops, and nobody waits any more."""

    def note(self, owner: str) -> None:
        """Something of an owner's has changed. Costs nothing where nobody watches."""
        for watch in self._watches.get(owner, ()):
            watch.note()

    def num_watching(self, owner: str) -> int:
        """How many wait."""
        return len(self._watches.get(owner, ()))

    @contextlib.contextmanager
    def watching(self, owner: str) -> Iterator[Watch]:
        """Told of changes while the block runs."""
        watch = Watch()
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
