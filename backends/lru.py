"""A cache of bounded size that evicts the least recently used."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Values by key, up to a total size. Safe to use from several threads."""

    def __init__(self, max_size: int, size_of: Callable[[V], int] = lambda _: 1, *, evicts: bool = True) -> None:
        """`size_of` a value is in the unit of `max_size`: bytes, or 1 each by default.

        Without `evicts` nothing is evicted until `trim` is called, so that values in use can be held for a while.
        """
        self._max_size = max_size
        self._size_of = size_of
        self._evicts = evicts
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()
        self.size = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Return the value, which becomes the most recently used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Cache a value in place of the key's old value. A value larger than the whole cache is not cached."""
        with self._lock:
            self.pop(key)
            size = self._size_of(value)
            if self._evicts and size > self._max_size:
                return
            self._values[key] = value
            self.size += size
            if self._evicts:
                self.trim()

    def setdefault(self, key: K, value: V) -> V:
        """Return the key's value; if it has none, cache and return `value`."""
        with self._lock:
            if (cached := self.get(key)) is not None:
                return cached
            self.put(key, value)
            return value

    def pop(self, key: K) -> V | None:
        """Remove a value and return it."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self.size -= self._size_of(value)
            return value

    def keep(self, wanted: Callable[[V], bool]) -> None:
        """Remove the values that are not wanted."""
        with self._lock:
            for key in [key for key, value in self._values.items() if not wanted(value)]:
                self.pop(key)

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._values.clear()
            self.size = 0

    def trim(self) -> None:
        """Evict the least recently used until the rest is within the total size."""
        with self._lock:
            while self.size > self._max_size:
                self.size -= self._size_of(self._values.popitem(last=False)[1])
