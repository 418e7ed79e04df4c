"""Who may use the engine after it died: those who were in it are suspects, and are tried apart from all others.

What kills an engine is nearly always one request, and which one it was nobody can tell. So the suspects run
again owner by owner, then in ever smaller groups, until one alone has killed the engine again: it fails, and
nobody else does. Knows neither engine nor process.
"""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from backends.protocol import BackendFailed

E = TypeVar("E")
R = TypeVar("R")
_GROUPS = 8
"""Into so many groups the suspects of one owner are split."""
_TRIAL_S = 20.0
"""A group that has run for so long, and twice as long as before the engine died, is taken for innocent."""


class EngineDied(Exception):
    """The engine ended while the task was in it."""


class _Entry:
    """One task on its way to the engine, in it, or back."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.is_guilty = False
        self.entered_at = 0.0
        self.ran_s = 0.0
        """How long it had been in the engine when that died."""


class Trials(Generic[E]):
    """Lets tasks into the engine: all at once while nothing is wrong, group by group after a death."""

    def __init__(self, engine: Callable[[], Awaitable[E]]) -> None:
        """`engine` waits for an engine that runs."""
        self._engine = engine
        self._inside: set[_Entry] = set()
        self._groups: deque[set[_Entry]] = deque()
        """Suspects; the first group is on trial, the others and all newcomers wait."""
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether any task is in the engine."""
        return bool(self._inside)

    async def run(self, owner: str, work: Callable[[E], Awaitable[R]]) -> R:
        """Do the work on an engine, again where the engine dies under it (`work` raises EngineDied then, after
        `engine_died` was called). Raises BackendFailed for work that has killed an engine by itself."""
        entry = _Entry(owner)
        try:
            while not entry.is_guilty:
                engine = await self._admission(entry)
                with contextlib.suppress(EngineDied), self._being_inside(entry):
                    return await work(engine)
        finally:
            self._clear(entry)
        raise BackendFailed(
            "the engine died twice while it worked on this request, the second time on nothing else. It was started"
            " again for the others; this request is not tried a third time"
        )

    async def _admission(self, entry: _Entry) -> E:
        while True:
            while self._groups and entry not in self._groups[0]:
                await self._changed.wait()
            engine = await self._engine()
            if not self._groups or entry in self._groups[0]:
                return engine

    @contextlib.contextmanager
    def _being_inside(self, entry: _Entry) -> Iterator[None]:
        self._inside.add(entry)
        entry.entered_at = time.monotonic()
        if self._groups and self._timer is None:
            group = self._groups[0]
            patience_s = max(_TRIAL_S, 2 * max(one.ran_s for one in group))
            self._timer = asyncio.get_running_loop().call_later(patience_s, self._end_trial)
        try:
            yield
        finally:
            self._inside.discard(entry)

    def engine_died(self) -> None:
        """To be called once per death, while all who were in the engine still count as inside."""
        suspects, now = set(self._inside), time.monotonic()
        on_trial = set(self._groups[0]) if self._groups else set()
        for entry in suspects:
            entry.ran_s = max(entry.ran_s, now - entry.entered_at)
        if len(suspects) == 1 and suspects <= on_trial:
            next(iter(suspects)).is_guilty = True
        else:
            self._groups.extend(_split(suspects))
        if on_trial:
            self._end_trial()

    def _clear(self, entry: _Entry) -> None:
        """The task is over."""
        for group in self._groups:
            group.discard(entry)
        if self._groups and not self._groups[0]:
            self._end_trial()

    def _end_trial(self) -> None:
        """The next group's turn, and when there is none everybody's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._groups.popleft()
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _split(suspects: set[_Entry]) -> list[set[_Entry]]:
    """By owner; those of one owner into a few groups. What had not run for long when the engine died comes first."""
    by_owner: dict[str, set[_Entry]] = defaultdict(set)
    for entry in suspects:
        by_owner[entry.owner].add(entry)
    groups = list(by_owner.values())
    if len(groups) == 1:
        entries = sorted(suspects, key=lambda one: one.ran_s)
        size = -(-len(entries) // _GROUPS)
        groups = [set(entries[start : start + size]) for start in range(0, len(entries), size)]
    return sorted(groups, key=lambda group: min(one.ran_s for one in group))
