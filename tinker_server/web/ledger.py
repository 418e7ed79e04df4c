"""The memory budget of request bodies in flight: one account per owner, charged before a body's first byte is read.

A body costs its length while it is received and handled. While it is decoded it also costs its decompressed length.
Fair queues grant both, and the encoding of results. Requests without an owner share one account.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from backends.processes.fair_queue import FairQueue
from tinker_server.errors import Busy

BODIES_OF_OWNER, BODIES_OF_ALL, BODIES_DECODED = 4, 8, 1
"""Budgets, in bodies of the largest size: an owner's, all owners', and for decoding."""
LEAST_BYTES = 64 << 10
"""Least cost of a request with a body: its connection, its buffers, its task."""
DECODED_AT_ONCE = 4
"""Bodies decoded at once, however small: each takes a thread."""
WAIT_S = 60.0
"""Seconds to wait for room; the SDK retries a refused request."""
STALL_S, BYTES_PER_S = 60.0, 32 << 10
"""Longest pause of a body, and its least rate on the whole: eight parts of 60 MB that share an uplink of 1 MB/s come
four times as fast."""


class Ledger:
    """Grants the bodies of all owners their part of the server's memory."""

    def __init__(self, max_body_bytes: int) -> None:
        self._of_owner = BODIES_OF_OWNER * max_body_bytes
        self._all = FairQueue(BODIES_OF_ALL * max_body_bytes)
        self._decoded_bytes = BODIES_DECODED * max_body_bytes
        self._decoding = FairQueue(self._decoded_bytes)
        self._encoding = FairQueue()
        self._owners: dict[str, FairQueue] = {}
        self._in_flight: Counter[str] = Counter()

    @property
    def largest_bytes(self) -> int:
        """Return the most memory that bodies take: what is received, and four times what is being decoded."""
        return 2 * self._of_owner + 4 * self._decoded_bytes

    @asynccontextmanager
    async def body(self, owner: str, size_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        """Hold room for a body while the block runs; what it yields takes the bytes that came, and gives back the rest.

        Raises Busy if there is no room for a while.
        """
        size_bytes = max(size_bytes, LEAST_BYTES)
        own = self._owners.setdefault(owner, FairQueue(self._of_owner))
        self._in_flight[owner] += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(WAIT_S):
                        shrink_own = await held.enter_async_context(own.grant(owner, "", size_bytes))
                        shrink_all = await held.enter_async_context(self._all.grant(owner, "", size_bytes))
                except TimeoutError:
                    raise Busy(
                        f"requests of {self._of_owner} bytes are in flight, for {WAIT_S:g} s; send this one later"
                    ) from None

                def came(num_bytes: int) -> None:
                    for shrink in (shrink_own, shrink_all):
                        shrink(max(num_bytes, LEAST_BYTES))

                yield came
        finally:
            self._in_flight[owner] -= 1
            if not self._in_flight[owner]:
                del self._in_flight[owner], self._owners[owner]

    def decoding(self, owner: str, size_bytes: int) -> AbstractAsyncContextManager[object]:
        """Hold room for decoding a body that decompresses to so many bytes."""
        return self._decoding.grant(owner, "", max(size_bytes, self._decoded_bytes // DECODED_AT_ONCE))

    def encoding(self, owner: str) -> AbstractAsyncContextManager[object]:
        """Hold the grant to encode one part of a result: threads that encode together would keep the interpreter from
        the event loop."""
        return self._encoding.grant(owner, "")
