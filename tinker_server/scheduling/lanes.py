"""One model's operations that wait, and which numbers may still come.

Numbers come in any order and some never come: the SDK may send the first part of a batch last, and what
it could not send, or was refused, keeps its number. A missing number is settled, that is no longer
waited for, when a later operation other than forward_backward arrives (the SDK sends those only after
all before them were answered), when the server itself refused it, or when a grace has passed.
"""

import asyncio
from dataclasses import dataclass, field

from tinker_server.store.operations import Operation

PARTS_OF_BATCHES = ("forward_backward", "forward")
"""Operations that may overtake each other on their way: one batch is sent as several."""


@dataclass
class Lane:
    """A model's operations that wait."""

    expected: int
    """Smallest number that has neither run nor been settled."""
    settled_below: int = 0
    refused: set[int] = field(default_factory=set)
    waiting: dict[int, Operation] = field(default_factory=dict)
    last_arrival_s: float = 0
    """By the event loop's clock."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    driver: asyncio.Task[None] | None = None

    def add(self, operation: Operation, now_s: float) -> None:
        """An operation has arrived."""
        self.waiting[operation.seq_id] = operation
        self.last_arrival_s = now_s
        if operation.operation_kind not in PARTS_OF_BATCHES:
            self.settled_below = max(self.settled_below, operation.seq_id)
        self.arrived.set()

    def refuse(self, number: int) -> None:
        """An operation was refused before it had a future."""
        if number >= self.expected:
            self.refused.add(number)
            self.arrived.set()

    def take(self) -> Operation:
        """The operation with the smallest number."""
        number = min(self.waiting)
        self.expected = max(self.expected, number + 1)
        return self.waiting.pop(number)

    def has_gap(self) -> bool:
        """Whether a number before the smallest that waits may still be on its way."""
        while self.expected in self.refused:
            self.refused.discard(self.expected)
            self.expected += 1
        number = min(self.waiting)
        return number > self.expected and number > self.settled_below

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting) or (self.driver is not None and not self.driver.done())
