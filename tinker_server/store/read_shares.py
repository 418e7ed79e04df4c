"""Shares of the database's connections for reads that may take seconds: lists, searches, and records of long times.

All owners, reads and writes use one pool of connections. Without shares, an owner who searches a lot would take all.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from backends.processes.fair_queue import FairQueue
from tinker_server.errors import Busy

OF_OWNER, OF_ALL = 2, 8
"""Such reads at once, of an owner and of all. The pool has 15 connections; the others are for all other work."""
WAIT_S = 60.0
"""Seconds to wait for a share. The SDK sends a refused request again."""


class ReadShares:
    """Grants reads to owners in turn."""

    def __init__(self) -> None:
        self._all = FairQueue(OF_ALL)
        self._owners: WeakValueDictionary[str, FairQueue] = WeakValueDictionary()

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        """Hold a share while the block runs. Raises Busy if there is none for a while."""
        own = self._owners.setdefault(owner, FairQueue(OF_OWNER))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(WAIT_S):
                    await held.enter_async_context(own.grant(owner, ""))
                    await held.enter_async_context(self._all.grant(owner, ""))
            except TimeoutError:
                raise Busy(
                    f"lists and searches wait for others of them, for {WAIT_S:g} s: {OF_OWNER} of an owner and {OF_ALL}"
                    " of all owners are read at once; send this one later"
                ) from None
            yield
