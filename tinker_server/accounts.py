"""What owners share, as memory for bodies, connections for lists or the disk: each has a bounded part."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from tinker_server.backends.processes.fair_queue import FairQueue
from tinker_server.errors import Busy

WAIT_S = 60.0
"""Seconds to wait for room; the SDK retries a refused request."""
HOUR_S = 3600.0
RECORD_BYTES = 1024
"""Bytes of a row in the database, beside what a client has in it."""
RECORDS_BYTES = 64 << 20
"""Bytes of rows that are kept for good and that an owner may add in an hour: 18 a second without a client's notes."""


class Accounts:
    """Bytes, or things done at once, that owners share: so many for each of them, and so many for all together."""

    def __init__(self, of_owner: int, of_all: int, refusal: str) -> None:
        """`refusal`: what an owner is told for whom there is no room."""
        self._of_owner = of_owner
        self._refusal = refusal
        self._all = FairQueue(of_all)
        self._owners: dict[str, FairQueue] = {}
        self._in_flight: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of owners that hold or want room."""
        return len(self._owners)

    @asynccontextmanager
    async def hold(self, owner: str, amount: int = 1, least: int = 0) -> AsyncIterator[Callable[[int], None]]:
        """Hold room while the block runs, at least so much; what it yields gives back all but so much.

        Raises Busy if there is no room for a while.
        """
        amount = max(amount, least)
        own = self._owners.setdefault(owner, FairQueue(self._of_owner))
        self._in_flight[owner] += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(WAIT_S):
                        shrink_own = await held.enter_async_context(own.grant(owner, "", amount))
                        shrink_all = await held.enter_async_context(self._all.grant(owner, "", amount))
                except TimeoutError:
                    raise Busy(self._refusal) from None

                def shrink(left: int) -> None:
                    for shrink_one in (shrink_own, shrink_all):
                        shrink_one(max(left, least))

                yield shrink
        finally:
            self._in_flight[owner] -= 1
            if not self._in_flight[owner]:
                del self._in_flight[owner], self._owners[owner]


class Records:
    """Bytes that each owner has added, in this hour, to the rows that are kept for good."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._added: Counter[str] = Counter()

    def add(self, owner: str, num_bytes: int = 0) -> None:
        """Count one more row, with so many bytes of a client's. Raises Busy if it is too much for this hour."""
        now = time.monotonic()
        if now - self._began >= HOUR_S:
            self._began = now
            self._added.clear()
        added = self._added[owner] + RECORD_BYTES + num_bytes
        if added > RECORDS_BYTES:
            raise Busy(
                "sessions, sampling sessions, models and entries of the audit log that were made in this hour have"
                f" {RECORDS_BYTES} bytes, which is an owner's limit: make fewer, or go on in"
                f" {self._began + HOUR_S - now:.0f} s"
            )
        self._added[owner] = added
