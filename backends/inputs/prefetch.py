"""Prefetch: run work on threads before its result is needed, within a bound of memory."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

R = TypeVar("R")
_MOST_THREADS = 8


class Prefetcher(Generic[R]):
    """Holds results by key until they are taken. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` of results that are not taken yet, done or not."""
        self._max_bytes = max_bytes
        self._results: dict[str, tuple[Future[R], int]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._may_start = threading.Event()
        self._may_start.set()

    def start(self, key: str, size_bytes: int, work: Callable[[], R]) -> None:
        """Start the work on a thread, unless it has started or there is no room for its result."""
        with self._lock:
            taken = sum(size for _, size in self._results.values())
            if key not in self._results and taken + size_bytes <= self._max_bytes:
                self._results[key] = self._pool().submit(self._when_resumed, work), size_bytes

    def take(self, key: str) -> R | None:
        """Wait for the result and remove it; None if the work was not started. Raises what the work raised."""
        with self._lock:
            future, _ = self._results.pop(key, (None, 0))
        return None if future is None else future.result()

    def cancel(self, key: str | None = None) -> None:
        """Drop this result, or without a key all."""
        with self._lock:
            for dropped in list(self._results) if key is None else [key]:
                future, _ = self._results.pop(dropped, (None, 0))
                if future is not None:
                    future.cancel()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Start no more work meanwhile. Python runs one thread at a time: a thread that launches kernels releases the
        GIL at each of them, and waits for all others before the next."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def _when_resumed(self, work: Callable[[], R]) -> R:
        self._may_start.wait()
        return work()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) - 1))
            # A torch thread each: more would compete for the same cores. The setting is per thread.
            self._threads = ThreadPoolExecutor(count, "prefetch", initializer=torch.set_num_threads, initargs=(1,))
        return self._threads
