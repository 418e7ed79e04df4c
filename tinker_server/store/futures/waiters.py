"""Operations without a result, and the polls that are held for them."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from tinker_server.store.futures.records import Operation
from tinker_server.store.futures.results import Result

RELEASED_HOLD_S = 1.0
"""A poll that comes while the server stops is held so long: its client would ask again at once, again and again."""


@dataclass(slots=True)
class Unfinished:
    """An operation that is accepted and whose result is not stored yet."""

    operation_kind: str
    lane: str
    seq_id: int
    owner: str
    result: Result | None = None
    """There, but not stored."""
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class Waiters:
    """By request_id, what is unfinished, and who waits for it."""

    def __init__(self) -> None:
        self._unfinished: dict[str, Unfinished] = {}
        self._released = asyncio.Event()
        """Set when the server stops, and nobody waits any more."""

    def add(self, operation: Operation) -> None:
        """An operation is about to be accepted."""
        self._unfinished[operation.request_id] = Unfinished(
            operation.operation_kind, operation.lane, operation.seq_id, operation.owner
        )

    def get(self, request_id: str) -> Unfinished | None:
        """None for what is stored or was never accepted."""
        return self._unfinished.get(request_id)

    def remove(self, request_id: str) -> None:
        """The operation's result is stored, or it was not accepted: whoever waits may look."""
        if (unfinished := self._unfinished.pop(request_id, None)) is not None:
            unfinished.stored.set()

    async def hold(self, request_id: str, hold_s: float) -> bool:
        """Wait for a result to be stored, at most so long; whether it may be there now."""
        unfinished = self._unfinished.get(request_id)
        if self._released.is_set():
            await asyncio.sleep(min(hold_s, RELEASED_HOLD_S))
        event = self._released if unfinished is None else unfinished.stored
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await event.wait()
        return request_id not in self._unfinished

    def has_unstored(self, lane: str, up_to: int | None = None) -> bool:
        """Whether a lane has a result that is not stored yet, of those up to a position in its log if one is given."""
        results = (one.result for one in self._unfinished.values() if one.lane == lane)
        return any(result is not None and (up_to is None or (result.position or 0) <= up_to) for result in results)

    def release(self) -> None:
        """Let all go empty-handed, for the server stops."""
        self._released.set()
        for unfinished in self._unfinished.values():
            unfinished.stored.set()
