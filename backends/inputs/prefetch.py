"""Work that is done on threads ahead of whoever needs its result, within a bound of memory."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

R = TypeVar("R")
_MOST_THREADS = 8


class Ahead(Generic[R]):
    """Results by key, until somebody takes them. Used by one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of results that nobody has taken yet, done or not."""
        self._max_bytes = max_bytes
        self._results: dict[str, tuple[Future[R], int]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._may_start = threading.Event()
        self._may_start.set()

    def begin(self, key: str, size_bytes: int, work: Callable[[], R]) -> None:
        """Start the work on a thread. Nothing happens where it has begun, or where there is no room for its result."""
        with self._lock:
            taken = sum(size for _, size in self._results.values())
            if key not in self._results and taken + size_bytes <= self._max_bytes:
                self._results[key] = self._pool().submit(self._in_turn, work), size_bytes

    def take(self, key: str) -> R | None:
        """The result, once it is there; None where the work was not begun. Raises what the work raised."""
        with self._lock:
            future, _ = self._results.pop(key, (None, 0))
        return None if future is None else future.result()

    def drop(self, key: str | None = None) -> None:
        """Nobody will take this result, or any."""
        with self._lock:
            for one in list(self._results) if key is None else [key]:
                future, _ = self._results.pop(one, (None, 0))
                if future is not None:
                    future.cancel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No more work starts meanwhile. Python runs one thread at a time: one that launches kernels lets go at each of
        them, and waits for all others before the next."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def _in_turn(self, work: Callable[[], R]) -> R:
        self._may_start.wait()
        return work()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) - 1))
            # Each works alone: threads of torch's beside them would fight for the same cores. Holds for that thread.
            self._threads = ThreadPoolExecutor(count, "ahead", initializer=torch.set_num_threads, initargs=(1,))
        return self._threads
