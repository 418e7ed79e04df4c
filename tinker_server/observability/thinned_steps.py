"""What is kept of a run's steps: a few items of each, of a bounded number of steps that are spread over the run."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
PER_STEP, STEPS = 4, 64
"""Items of a step, and steps of a run, that are kept."""


class ThinnedSteps(Generic[K, V]):
    """Items of a run, in order, by what names their step."""

    def __init__(self) -> None:
        self._items: dict[K, list[V]] = {}
        self._at: dict[K, float] = {}

    def __iter__(self) -> Iterator[V]:
        """Yield the items, oldest step first."""
        for items in self._items.values():
            yield from items

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, step: K, at: float, item: V) -> list[V]:
        """Add an item of a step that was made `at` this time, no earlier than the others. Return what has to go."""
        items = self._items.setdefault(step, [])
        self._at.setdefault(step, at)
        if len(items) == PER_STEP:
            return [item]
        items.append(item)
        return self.thin() if len(self._items) > STEPS else []

    def thin(self) -> list[V]:
        """Remove the step whose neighbours are closest in time, else the oldest, and return its items."""
        steps = list(self._items)
        inner = range(1, len(steps) - 1)
        gap_s = {number: self._at[steps[number + 1]] - self._at[steps[number - 1]] for number in inner}
        gone = steps[min(gap_s, key=lambda number: gap_s[number])] if gap_s else steps[0]
        del self._at[gone]
        return self._items.pop(gone)
