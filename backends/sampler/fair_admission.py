"""Which sequence enters the engine next: owners take turns, then the adapters of an owner, then arrival decides.

The engine decodes so many sequences (rows) at once, of so many adapters (slots), and would serve whoever came
first. Here a row enters only when the engine has a place for it, so that a flood waits outside. Knows no engine.
"""

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from backends.protocol import EngineUse

NEWCOMER_ROWS = 8
"""Rows beyond the limit for owners who have none running: they need not wait until another's row ends."""


@dataclass(eq=False)
class _Row:
    """A sequence that waits. `admitted` gives how many rows its owner had in the engine before it."""

    arrival: int
    admitted: asyncio.Future[int]


@dataclass(eq=False)
class _Queue:
    """Waiting rows of one owner and one adapter, in order of arrival; never empty for long."""

    owner: str
    adapter: Path | None
    rows: deque[_Row] = field(default_factory=deque)
    last_row: int = 0
    """When one of its rows was admitted last, 0 for never."""
    last_slot: int = 0
    """When its adapter last had to give its slot away, 0 for never."""


@dataclass(eq=False)
class _Slot:
    """An adapter's place in the engine, in the name of the owner who asked for it first."""

    owner: str
    since: int
    num_running: int = 0
    num_admitted: int = 0


class Turns:
    """The engine's rows and slots, shared out."""

    def __init__(self, max_rows: int, max_adapters: int) -> None:
        self._max_rows = max_rows
        self._max_adapters = max_adapters
        self._rows_per_turn = max(1, max_rows // max_adapters)
        """Rows that an adapter may admit in all once another waits for its slot: enough for all slots together
        to fill the engine."""
        self._queues: dict[tuple[str, Path | None], _Queue] = {}
        self._slots: dict[Path, _Slot] = {}
        """In order of time, the oldest first."""
        self._running: Counter[str] = Counter()
        """Rows in the engine by owner."""
        self._last_served: dict[str, int] = {}
        self._clock = itertools.count(1)

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, adapter: Path | None) -> AsyncIterator[int]:
        """Inside, one row of this owner and adapter may run. Gives how many rows the owner had running before."""
        queue = self._queues.setdefault((owner, adapter), _Queue(owner, adapter))
        row = _Row(next(self._clock), asyncio.get_running_loop().create_future())
        queue.rows.append(row)
        self._admit()
        try:
            num_before = await row.admitted
        except asyncio.CancelledError:
            if row in queue.rows:
                queue.rows.remove(row)
                self._forget_if_empty(queue)
            else:
                self._leave(owner, adapter)
            raise
        try:
            yield num_before
        finally:
            self._leave(owner, adapter)

    @property
    def use(self) -> EngineUse:
        """How much of it is taken."""
        waiting = sum(len(queue.rows) for queue in self._queues.values())
        return EngineUse(self._running.total(), waiting, self._max_rows, len(self._slots), self._max_adapters)

    def _leave(self, owner: str, adapter: Path | None) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if adapter is not None:
            self._slots[adapter].num_running -= 1
        self._admit()
        if not self._running:  # then nothing waits either
            self._last_served.clear()

    def _admit(self) -> None:
        """Let in every row that may enter now."""
        self._share_slots()
        closing = self._closing()
        while queues := [one for one in self._queues.values() if self._has_room(one) and self._is_open(one, closing)]:
            queue = min(queues, key=self._owners_turn)
            row = queue.rows.popleft()
            queue.last_row = self._last_served[queue.owner] = next(self._clock)
            if queue.adapter is not None:
                self._slots[queue.adapter].num_running += 1
                self._slots[queue.adapter].num_admitted += 1
            if not row.admitted.done():  # else it was cancelled, and leaves at once
                row.admitted.set_result(self._running[queue.owner])
            self._running[queue.owner] += 1
            self._forget_if_empty(queue)

    def _owners_turn(self, queue: _Queue) -> tuple[int, int, int]:
        """Least first: the owner with the fewest rows, longest not served; of his adapters the same."""
        return self._running[queue.owner], self._last_served.get(queue.owner, 0), queue.last_row

    def _has_room(self, queue: _Queue) -> bool:
        newcomer = not self._running[queue.owner]
        return self._running.total() < self._max_rows + (NEWCOMER_ROWS if newcomer else 0)

    def _is_open(self, queue: _Queue, closing: dict[Path, int]) -> bool:
        """Whether the adapter's slot, where it needs one, takes the first waiting row."""
        if queue.adapter is None:
            return True
        slot = self._slots.get(queue.adapter)
        if slot is None:
            return False
        limit = closing.get(queue.adapter)
        return limit is None or (queue.rows[0].arrival < limit and slot.num_admitted < self._rows_per_turn)

    def _share_slots(self) -> None:
        """Take slots from adapters that run nothing and may admit nothing; give free ones to those that wait."""
        closing = self._closing()
        wanted = {queue.adapter for queue in self._queues.values() if self._is_open(queue, closing)}
        for adapter in [one for one, slot in self._slots.items() if slot.num_running == 0 and one not in wanted]:
            del self._slots[adapter]
            for queue in self._queues.values():
                if queue.adapter == adapter:
                    queue.last_slot = next(self._clock)
        for queue in self._without_slot()[: self._max_adapters - len(self._slots)]:
            assert queue.adapter is not None
            self._slots[queue.adapter] = _Slot(queue.owner, next(self._clock))

    def _without_slot(self) -> list[_Queue]:
        """One queue for each adapter that waits for a slot: first those whose owner holds the fewest."""
        queues = [one for one in self._queues.values() if one.adapter is not None and one.adapter not in self._slots]
        if not queues:  # nearly always
            return []
        held = Counter(slot.owner for slot in self._slots.values())
        queues.sort(key=lambda one: (held[one.owner], one.last_slot, one.rows[0].arrival))
        return list({queue.adapter: queue for queue in reversed(queues)}.values())[::-1]

    def _closing(self) -> dict[Path, int]:
        """Adapters that are to give their slot away, one for each that waits for one.

        Of such an adapter only rows that arrived before the number given still enter, and no more than a turn's:
        those that were there when it got the slot, or before the other one asked. None (0) where its owner holds
        so many slots that he has more than the other even without it.
        """
        waiting = self._without_slot()[max(0, self._max_adapters - len(self._slots)) :]
        if not waiting:
            return {}
        held = Counter(slot.owner for slot in self._slots.values())
        candidates = dict(self._slots)
        closing: dict[Path, int] = {}
        for queue in waiting:
            richer = [one for one, slot in candidates.items() if held[slot.owner] > held[queue.owner]]
            own = [one for one, slot in candidates.items() if slot.owner == queue.owner]
            if not richer and not own:
                continue
            adapter = max(richer, key=lambda one: held[candidates[one].owner]) if richer else own[0]
            slot = candidates.pop(adapter)
            has_more = held[slot.owner] > held[queue.owner] + 1
            closing[adapter] = 0 if has_more else max(slot.since, queue.rows[0].arrival)
            held[slot.owner] -= 1
            held[queue.owner] += 1
        return closing

    def _forget_if_empty(self, queue: _Queue) -> None:
        if not queue.rows:
            self._queues.pop((queue.owner, queue.adapter), None)
