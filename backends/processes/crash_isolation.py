"""Find the work that crashes a process: nearly always it is a single piece, and nobody can tell which.

The suspects of a crash run again in groups, one group after the other, until one alone has crashed the process again:
the culprit, which is not run once more. Knows neither processes nor work. Suspects that outlive the process are noted
durably by their user: before each attempt, in `prepare`.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P")
_GROUPS = 8
"""Number of groups that suspects are split into."""
_TRIAL_S = 20.0
"""A group that has run for this long, and twice as long as before the crash, is taken for innocent."""


@dataclass(eq=False)
class Suspect:
    """A piece of work that may crash the process."""

    owner: str = ""
    is_culprit: bool = False
    began_at: float = 0.0
    ran_s: float = 0.0
    """Seconds that it had run when the process crashed."""


class CrashIsolation:
    """Admits work: all at once while nothing is wrong, group by group after a crash."""

    def __init__(self, *, is_exclusive: bool) -> None:
        """If `is_exclusive`, a group runs apart from all that is no suspect, and for a limited time."""
        self._is_exclusive = is_exclusive
        self._running: set[Suspect] = set()
        self._groups: deque[set[Suspect]] = deque()
        """The first runs, the others wait."""
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last_crashed: object = None

    @property
    def is_busy(self) -> bool:
        """Return whether any work runs."""
        return bool(self._running)

    @property
    def has_suspects(self) -> bool:
        """Return whether any work is suspected, which goes before all that is not."""
        return bool(self._groups)

    async def wait_until_clear(self) -> None:
        """Wait until no work is suspected."""
        while self._groups:
            await self._changed.wait()

    @asynccontextmanager
    async def admit(self, work: Suspect, prepare: Callable[[], Awaitable[P]]) -> AsyncIterator[P]:
        """Wait until the work may run, then for `prepare`, and give the block what that returned."""
        while True:
            while self._groups and self._must_wait(work):
                await self._changed.wait()
            prepared = await prepare()
            if not self._groups or not self._must_wait(work):
                break
        self._running.add(work)
        work.began_at = time.monotonic()
        if self._is_exclusive and self._groups and self._timer is None:
            patience_s = max(_TRIAL_S, 2 * max(group.ran_s for group in self._groups[0]))
            self._timer = asyncio.get_running_loop().call_later(patience_s, self._next_group)
        try:
            yield prepared
        finally:
            self._running.discard(work)

    def _must_wait(self, work: Suspect) -> bool:
        if work in self._groups[0]:
            return False
        return self._is_exclusive or any(work in group for group in self._groups)

    def note_crash(self, process: object) -> None:
        """Suspect all work that runs. To be called before any of it has left; later calls for the same process do
        nothing."""
        if process is self._last_crashed:
            return
        self._last_crashed = process
        suspects, now = set(self._running), time.monotonic()
        on_trial = set(self._groups[0]) if self._groups else set()
        for suspect in suspects:
            suspect.ran_s = max(suspect.ran_s, now - suspect.began_at)
        if len(suspects) == 1 and suspects <= on_trial:
            next(iter(suspects)).is_culprit = True
        else:
            self._groups.extend(_split(suspects))
        if on_trial:
            self._next_group()

    def isolate(self, suspects: Sequence[Suspect], num_in_one: int) -> None:
        """Have these run in groups of the size that so many of them need, the first of them first."""
        self._groups.extend(_in_groups(suspects, num_in_one))

    def release(self, work: Suspect) -> None:
        """Forget work that has ended, or will not run."""
        for group in self._groups:
            group.discard(work)
        if self._groups and not self._groups[0]:
            self._next_group()

    def _next_group(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._groups.popleft()
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _split(suspects: set[Suspect]) -> list[set[Suspect]]:
    """Split by owner, and an owner's into groups. Those that had not run for long at the crash come first."""
    by_owner: dict[str, set[Suspect]] = defaultdict(set)
    for suspect in suspects:
        by_owner[suspect.owner].add(suspect)
    groups = list(by_owner.values())
    if len(groups) == 1:
        groups = _in_groups(sorted(suspects, key=lambda suspect: suspect.ran_s), len(suspects))
    return sorted(groups, key=lambda group: min(suspect.ran_s for suspect in group))


def _in_groups(suspects: Sequence[Suspect], num: int) -> list[set[Suspect]]:
    """Split into groups, of a size that would make `_GROUPS` of `num` suspects."""
    size = max(1, -(-num // _GROUPS))
    return [set(suspects[start : start + size]) for start in range(0, len(suspects), size)]
