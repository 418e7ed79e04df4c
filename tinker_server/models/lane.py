"""A model's operations that wait, the numbers that may still come, and whether the gradient is whole.

Numbers come in any order and some never come: the SDK may send the first part of a batch last, and what it could not
send, or was refused, keeps its number. A missing number is settled, that is no longer waited for, when a later
operation other than a part of a batch arrives (the SDK sends those only after all before them were answered), when the
server itself refused it, or when a grace has passed.

A skipped number may be a forward_backward. The gradient is then incomplete, as after a failure, and the next
optim_step fails. A part of a batch that comes late, but before that step is taken, makes the gradient
whole again. A later part, or an operation that is no part of a batch, is refused: the gradient has changed by then.
All this is in the rows of the lane too, from which a restarted server takes it.
"""

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Collection, Container
from dataclasses import dataclass, field

from tinker_server.store.futures.records import Operation, PastOperation

PARTS_OF_BATCHES = ("forward_backward", "forward")
"""Operations that may overtake each other on their way: a batch is sent as several."""
CLEARING = ("optim_step", "load_weights", "create_model")
"""Operations after which there is no gradient."""
MAX_REFUSED = 10_000
"""Refused numbers that are remembered; others are settled like those that never come."""
MAX_LET_IN = 16
"""Numbers beyond their owner's bounds that wait in a lane: each may be as large as a body."""
BUSY_S = 60.0
"""A number that was answered 429 is waited for so long: longer than the SDK's longest pause before it tries again."""


@dataclass
class Lane:
    """A model's operations that wait, by number."""

    expected: int
    """Smallest number that has neither run nor been settled."""
    missing: str = ""
    """Says what the accumulated gradient lacks for good; empty: nothing."""
    skipped: set[int] = field(default_factory=set)
    """Numbers of this gradient's operations that never came, and still may."""
    lacking: str = ""
    """Says what the gradient lacked, for good or not, when the running operation was taken."""
    settled_below: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    """Kind of operation by number."""
    busy_until_s: dict[int, float] = field(default_factory=dict)
    """Numbers that were answered 429, and will be sent again."""
    waiting: dict[int, Operation] = field(default_factory=dict)
    waiting_numbers: list[int] = field(default_factory=list)
    """A heap: there may be thousands."""
    refused_below: int = 0
    """All numbers from `expected` to this are refused."""
    let_in: set[int] = field(default_factory=set)
    """Numbers that arrive or wait beyond their owner's bounds."""
    arriving: Counter[int] = field(default_factory=Counter)
    """Numbers that are being stored: nothing behind them begins before."""
    last_arrival_s: float = 0
    """By the event loop's clock."""

    def add(self, operation: Operation, now_s: float) -> None:
        """Take in an operation that has arrived."""
        if operation.seq_id not in self.waiting:
            heapq.heappush(self.waiting_numbers, operation.seq_id)
        self.waiting[operation.seq_id] = operation
        self.busy_until_s.pop(operation.seq_id, None)
        self.last_arrival_s = now_s
        if operation.operation_kind not in PARTS_OF_BATCHES:
            self.settled_below = max(self.settled_below, operation.seq_id)

    def refuse(self, number: int, operation_kind: str) -> None:
        """Note that an operation was refused before it had a future."""
        if number >= self.expected and len(self.refused) < MAX_REFUSED:
            self.refused[number] = operation_kind

    def put_off(self, number: int, now_s: float) -> None:
        """Note a 429: the client will send the number again."""
        if len(self.busy_until_s) < MAX_REFUSED:
            self.busy_until_s[number] = now_s + BUSY_S

    def lets_in(self, number: int) -> bool:
        """Return whether a number may exceed its owner's bounds, since all that waits here waits for it: the first
        missing number, and a few others, since the first may never come."""
        if not self.waiting or number >= self.waiting_numbers[0]:
            return False
        if number != self._first_missing() and len(self.let_in) >= MAX_LET_IN:
            return False
        self.let_in.add(number)
        return True

    def takes(self, operation_kind: str, number: int) -> bool:
        """Return whether no later operation has run, or the operation is a missing part of the current gradient.

        A model that is created again, as number 0, learns that from its result.
        """
        is_late_part = operation_kind in PARTS_OF_BATCHES and number in self.skipped
        return number >= self.expected or is_late_part or number == 0

    def take(self) -> Operation:
        """Hand out the operation with the smallest number. A number skipped for it is missing until it comes."""
        number = heapq.heappop(self.waiting_numbers)
        if number > self.expected:
            self._settle_before(number)
        self.skipped.discard(number)
        self.let_in.discard(number)
        operation = self.waiting.pop(number)
        self.lacking = self.missing or (_lacking(self.skipped) if self.skipped else "")
        if operation.operation_kind in CLEARING and number >= self.expected:
            self.skipped.clear()  # what comes from now on comes too late
        self.expected = max(self.expected, number + 1)
        return operation

    def take_all(self) -> list[Operation]:
        """Hand out all operations that wait, in order."""
        return [self.take() for _ in range(len(self.waiting))]

    def _settle_before(self, number: int) -> None:
        harmless = {seq_id for seq_id, kind in self.refused.items() if seq_id < number and kind not in GRADIENT_KINDS}
        self.skip(number, harmless)
        for settled in (self.refused, self.busy_until_s):
            for seq_id in [seq_id for seq_id in settled if seq_id < number]:
                del settled[seq_id]

    def skip(self, number: int, harmless: Container[int] = ()) -> None:
        """Note that numbers before it have not come; `harmless` operations change no gradient."""
        if number - self.expected > MAX_REFUSED:
            self.missing = self.missing or _lacking({number - 1})
        else:
            self.skipped.update(seq_id for seq_id in range(self.expected, number) if seq_id not in harmless)

    def note(self, operation: Operation, failure_category: str | None) -> None:
        """Note that an operation has ended, well or with a failure."""
        kind, number = operation.operation_kind, operation.seq_id
        self.missing = missing_after(self.missing, kind, number, failure_category)

    def wait_s(self, now_s: float, grace_s: float) -> float:
        """Return the seconds for which a number before the smallest that waits is still waited for; not positive
        where none is."""
        number = self.waiting_numbers[0]
        if any(earlier < number for earlier in self.arriving):
            return grace_s
        if number <= max(self.expected, self.settled_below) or number <= (first := self._first_missing()):
            return 0
        until_s = [until for seq_id, until in self.busy_until_s.items() if first <= seq_id < number]
        return max(self.last_arrival_s + grace_s, *until_s, 0) - now_s

    def _first_missing(self) -> int:
        """Return the smallest number that has neither run nor been settled or refused; it may wait."""
        first = max(self.expected, self.refused_below)
        while first in self.refused:
            first += 1
        self.refused_below = first
        return first


GRADIENT_KINDS = ("forward_backward", "optim_step")
"""Operations whose refusal leaves the gradient wrong: a refused step would have cleared it."""


def _lacking(skipped: Collection[int]) -> str:
    return f"an operation of number {min(skipped)} was refused, or never came"


def missing_after(missing: str, operation_kind: str, seq_id: int, failure_category: str | None) -> str:
    """Return what the gradient lacks after a further operation."""
    if operation_kind == "forward_backward" and failure_category is not None:
        return f"forward_backward {seq_id} failed"
    if operation_kind in CLEARING:
        if failure_category is None or (operation_kind == "optim_step" and failure_category == "user"):
            return ""
        if operation_kind == "optim_step":
            return f"optim_step {seq_id} failed, and its gradient was not cleared"
    return missing


async def lane_after(past: AsyncIterator[PastOperation], first: int) -> Lane:
    """Make a model's lane from its operations that have ended, the largest number first. It begins with `first` where
    there are none."""
    since_clearing: list[PastOperation] = []
    async for operation in past:
        since_clearing.append(operation)
        if operation.operation_kind in CLEARING and not operation.failed:
            break
    if not since_clearing:
        return Lane(expected=first)
    lane = Lane(expected=since_clearing[-1].seq_id)
    for operation in reversed(since_clearing):
        lane.skip(operation.seq_id)
        lane.expected = operation.seq_id + 1
        if operation.operation_kind in CLEARING:
            lane.skipped.clear()
        category = (operation.failure_category or "server") if operation.failed else None
        lane.missing = missing_after(lane.missing, operation.operation_kind, operation.seq_id, category)
    return lane
