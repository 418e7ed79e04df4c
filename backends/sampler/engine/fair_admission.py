"""Decides which sequence enters the engine next: by owner, then by the owner's adapters, then by arrival.

The engine decodes a limited number of sequences at once, with a limited number of adapters (slots), and would serve
them in order of arrival. Here a sequence enters only when the engine has room for it, so a flood waits outside. Knows
no engine.

Where a model has several engines, each shares itself out in this way, and knows how many sequences each owner has
running in the others (`pool.py`): an owner's grants count wherever they are. But an owner with no sequence here goes
first, whatever it runs elsewhere: its waiting sequences cannot move.
"""

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinker_server.backends.protocol import EngineUse

RESERVE = 8
"""Sequences beyond the limit for owners who have none running: they need not wait until another's sequence ends."""


@dataclass(eq=False)
class _Sequence:
    """A waiting sequence. The result of `admitted` is how many its owner had in the engine before it."""

    arrival: int
    admitted: asyncio.Future[int]


@dataclass(eq=False)
class _Queue:
    """Waiting sequences of an owner and one adapter, in order of arrival; never empty for long."""

    owner: str
    adapter: Path | None
    waiting: deque[_Sequence] = field(default_factory=deque)
    last_admitted: int = 0
    """Time of its latest admission, 0 for never."""
    last_slot: int = 0
    """Time at which its adapter last gave its slot up, 0 for never."""


@dataclass(eq=False)
class _Slot:
    """An adapter's slot in the engine, owned by whoever asked for it first."""

    owner: str
    since: int
    num_running: int = 0
    num_admitted: int = 0


class FairAdmission:
    """Shares out the engine's sequences and slots."""

    def __init__(self, max_sequences: int, max_adapters: int) -> None:
        self._max_sequences = max_sequences
        self._max_adapters = max_adapters
        self._sequences_per_slot = max(1, max_sequences // max_adapters)
        """Sequences that an adapter may admit in all once another waits for its slot: all slots together fill the
        engine."""
        self._queues: dict[tuple[str, Path | None], _Queue] = {}
        self._slots: dict[Path, _Slot] = {}
        """The oldest first."""
        self._running: Counter[str] = Counter()
        """Sequences in the engine, by owner."""
        self.elsewhere: Mapping[str, int] = {}
        """Sequences in the pool's other engines, by owner, as of their last report."""
        self._last_served: dict[str, int] = {}
        self._clock = itertools.count(1)

    @contextlib.asynccontextmanager
    async def admission(self, owner: str, adapter: Path | None) -> AsyncIterator[int]:
        """Inside, one sequence of this owner and adapter may run. Yields how many the owner had running before,
        in the whole pool."""
        queue = self._queues.setdefault((owner, adapter), _Queue(owner, adapter))
        sequence = _Sequence(next(self._clock), asyncio.get_running_loop().create_future())
        queue.waiting.append(sequence)
        self._admit()
        try:
            num_before = await sequence.admitted
        except asyncio.CancelledError:
            if sequence in queue.waiting:
                queue.waiting.remove(sequence)
                self._drop_if_empty(queue)
                self._admit()  # what waited so that it gets a slot waits no more
            else:
                self._leave(owner, adapter)
            raise
        try:
            yield num_before
        finally:
            self._leave(owner, adapter)

    @property
    def running(self) -> dict[str, int]:
        """Return the number of sequences in the engine, by owner."""
        return dict(self._running)

    @property
    def use(self) -> EngineUse:
        """Count what runs and waits."""
        waiting = sum(len(queue.waiting) for queue in self._queues.values())
        return EngineUse(self._running.total(), waiting, self._max_sequences, len(self._slots), self._max_adapters)

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
        """Admit every sequence that may enter now."""
        self._share_slots()
        closing = self._closing()
        while queues := [
            queue for queue in self._queues.values() if self._has_room(queue) and self._is_open(queue, closing)
        ]:
            queue = min(queues, key=self._order)
            sequence = queue.waiting.popleft()
            queue.last_admitted = self._last_served[queue.owner] = next(self._clock)
            if queue.adapter is not None:
                self._slots[queue.adapter].num_running += 1
                self._slots[queue.adapter].num_admitted += 1
            if not sequence.admitted.done():  # else it was cancelled, and leaves at once
                sequence.admitted.set_result(self._in_pool(queue.owner))
            self._running[queue.owner] += 1
            self._drop_if_empty(queue)

    def _order(self, queue: _Queue) -> tuple[bool, int, int, int]:
        """Order queues, the least first: owners with none here, fewest sequences of the owner in the pool, owner served
        longest ago, adapter likewise."""
        owner = queue.owner
        last_served = self._last_served.get(owner, 0)
        return self._running[owner] > 0, self._in_pool(owner), last_served, queue.last_admitted

    def _in_pool(self, owner: str) -> int:
        return self._running[owner] + self.elsewhere.get(owner, 0)

    def _has_room(self, queue: _Queue) -> bool:
        reserve = 0 if self._running[queue.owner] else RESERVE
        return self._running.total() < self._max_sequences + reserve

    def _is_open(self, queue: _Queue, closing: dict[Path, int]) -> bool:
        """Return whether the adapter's slot, where it needs one, takes the first waiting sequence."""
        if queue.adapter is None:
            return True
        slot = self._slots.get(queue.adapter)
        if slot is None:
            return False
        limit = closing.get(queue.adapter)
        return limit is None or (queue.waiting[0].arrival < limit and slot.num_admitted < self._sequences_per_slot)

    def _share_slots(self) -> None:
        """Release slots of adapters that run nothing and may admit nothing; give free ones to those that wait."""
        closing = self._closing()
        wanted = {queue.adapter for queue in self._queues.values() if self._is_open(queue, closing)}
        for adapter in [name for name, slot in self._slots.items() if slot.num_running == 0 and name not in wanted]:
            del self._slots[adapter]
            for queue in self._queues.values():
                if queue.adapter == adapter:
                    queue.last_slot = next(self._clock)
        for queue in self._without_slot()[: self._max_adapters - len(self._slots)]:
            assert queue.adapter is not None
            self._slots[queue.adapter] = _Slot(queue.owner, next(self._clock))

    def _without_slot(self) -> list[_Queue]:
        """Return one queue for each adapter that waits for a slot: first those whose owner holds the fewest."""
        queues = [
            queue for queue in self._queues.values() if queue.adapter is not None and queue.adapter not in self._slots
        ]
        if not queues:  # nearly always
            return []
        held = Counter(slot.owner for slot in self._slots.values())
        queues.sort(key=lambda queue: (held[queue.owner], queue.last_slot, queue.waiting[0].arrival))
        return list({queue.adapter: queue for queue in reversed(queues)}.values())[::-1]

    def _closing(self) -> dict[Path, int]:
        """Map each adapter that must release its slot to an arrival number, one adapter for each that waits for a slot.

        Only sequences that arrived before the number are still admitted, `_sequences_per_slot` at most: those that were
        there when the adapter got the slot, or before the other one asked. The number is 0 if the owner would still
        hold more slots than the waiting one after the release.
        """
        without = self._without_slot()[max(0, self._max_adapters - len(self._slots)) :]
        if not without:
            return {}
        held = Counter(slot.owner for slot in self._slots.values())
        candidates = dict(self._slots)
        closing: dict[Path, int] = {}
        for queue in without:
            richer = [name for name, slot in candidates.items() if held[slot.owner] > held[queue.owner]]
            own = [name for name, slot in candidates.items() if slot.owner == queue.owner]
            if not richer and not own:
                continue
            adapter = max(richer, key=lambda name: held[candidates[name].owner]) if richer else own[0]
            slot = candidates.pop(adapter)
            has_more = held[slot.owner] > held[queue.owner] + 1
            closing[adapter] = 0 if has_more else max(slot.since, queue.waiting[0].arrival)
            held[slot.owner] -= 1
            held[queue.owner] += 1
        return closing

    def _drop_if_empty(self, queue: _Queue) -> None:
        if not queue.waiting:
            self._queues.pop((queue.owner, queue.adapter), None)
