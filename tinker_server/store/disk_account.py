"""New work of owners that hold more of the disk than their part: what they have fetched goes first, then it is refused.

A submit compares numbers in memory. Bytes are measured at an owner's first submit, when its part seems to be used up,
and from time to time. In between, what was stored since is added, and nothing is subtracted.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from tinker_server.errors import Busy
from tinker_server.store.futures.fetched import RESENT_S
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.holdings import Holdings, Part

AGAIN_S = 1.0
"""Seconds for which a measure that refuses work stays."""


@dataclass(frozen=True)
class _Measure:
    part: Part
    stored_bytes: int
    """Bytes that had been stored since the server started."""
    limit_bytes: int
    """Most bytes stored since then, or due as results of accepted operations, for which the part has room."""
    at: float
    """By the monotonic clock."""


class DiskAccount:
    """The bytes on disk that owners add by their work."""

    def __init__(self, holdings: Holdings, futures: FutureStore, clock: Callable[[], float]) -> None:
        self._holdings = holdings
        self._futures = futures
        self._clock = clock
        self._measures: dict[str, _Measure] = {}
        self._measuring: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def require_room(self, owner: str, more_bytes: int) -> None:
        """Make room for so many bytes of new work if the owner's part is used up. Raises Busy if there is none."""
        stored, due = self._futures.queue.stored_bytes, self._futures.queue.due_bytes
        measure = self._measures.get(owner)
        if measure is not None and stored[owner] + due[owner] + more_bytes <= measure.limit_bytes:
            return
        if measure is None or time.monotonic() - measure.at > AGAIN_S:
            measure = await self._measure(owner, more_bytes)
        more_bytes += stored[owner] + due[owner] - measure.stored_bytes
        if not measure.part.has_room(more_bytes):
            raise Busy(
                f"{measure.part.describe(owner, more_bytes)}: delete weights, unload models, or fetch results, which"
                f" may be deleted {RESENT_S:.0f} s after they were sent; send this one later"
            )

    def add(self, owner: str, num_bytes: int) -> None:
        """Count bytes that were stored, beside bodies and results."""
        self._futures.queue.stored_bytes[owner] += num_bytes

    async def sweep(self, now: float) -> None:
        """Delete large results that were fetched a while ago, and measure the owners that have stored anything."""
        await self._futures.expire_large(now)
        for owner, measure in list(self._measures.items()):
            if self._futures.queue.stored_bytes[owner] != measure.stored_bytes:
                await self._measure(owner, 0)

    async def _measure(self, owner: str, more_bytes: int) -> _Measure:
        began = time.monotonic()
        async with self._measuring[owner]:
            known = self._measures.get(owner)
            if known is not None and known.at > began:
                return known  # measured while this waited
            stored_bytes = self._futures.queue.stored_bytes[owner]
            part = await self._holdings.part(owner)
            more_bytes += self._futures.queue.due_bytes[owner]
            if not part.has_room(more_bytes) and await self._futures.expire_fetched(
                owner, part.excess_bytes(more_bytes), self._clock()
            ):
                part = await self._holdings.part(owner)
            limit_bytes = math.floor(part.allowed_bytes) - part.held_bytes + stored_bytes
            measure = self._measures[owner] = _Measure(part, stored_bytes, limit_bytes, time.monotonic())
            return measure
