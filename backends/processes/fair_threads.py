"""Threads that work for owners in turn, and for each owner on few things at once."""

import asyncio
import contextvars
import functools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Work:
    """A call that waits for a thread."""

    call: Callable[[], object]
    result: Future[Any]


class FairThreads:
    """A few threads. A flood of an owner takes so many of them, and delays another's work by a call at most.

    A thread takes its next work itself: a busy event loop does not delay it. A call cannot be stopped, so it keeps its
    owner's turn until it ends, even if nobody waits for it any more.
    """

    def __init__(self, count: int, name: str, of_owner: int = 1, long_s: float = math.inf) -> None:
        """`of_owner`: threads that work for the same owner, fewer than there are. `long_s`: processor time of a call
        after which its owner's next call waits for as long, so that all else gets the interpreter in between."""
        self._of_owner = of_owner
        self._long_s = long_s
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Work]] = {}
        """By owner, the owner who is next first."""
        self._working: Counter[str] = Counter()
        """Threads that work, by owner."""

    async def run(self, owner: str, function: Callable[..., T], *args: object) -> T:
        """Call the function in a thread when it is the owner's turn, and return its result."""
        call = functools.partial(contextvars.copy_context().run, function, *args)
        work = _Work(call, Future())
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(work)
        self._threads.submit(self._serve)
        try:
            result: T = await asyncio.wrap_future(work.result)
        except asyncio.CancelledError:
            self._leave(owner, work)
            raise
        return result

    def close(self) -> None:
        """Start no more work; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        """Work until all that waits belongs to owners for whom enough threads work: they go on with it."""
        while (found := self._next()) is not None:
            owner, work = found
            try:
                if work.result.set_running_or_notify_cancel():
                    began_s = time.thread_time()
                    _finish(work)
                    if (took_s := time.thread_time() - began_s) > self._long_s:
                        time.sleep(took_s)
            finally:
                with self._lock:
                    self._working[owner] -= 1
                    if not self._working[owner]:
                        del self._working[owner]
            del found, work  # else a waiting thread would hold the last arguments

    def _next(self) -> tuple[str, _Work] | None:
        with self._lock:
            owner = next((candidate for candidate in self._waiting if self._working[candidate] < self._of_owner), None)
            if owner is None:
                return None
            works = self._waiting.pop(owner)
            work = works.popleft()
            if works:
                self._waiting[owner] = works  # behind all others
            self._working[owner] += 1
            return owner, work

    def _leave(self, owner: str, work: _Work) -> None:
        """Remove work that nobody waits for any more, with what its arguments hold."""
        with self._lock:
            works = self._waiting.get(owner, deque())
            if work in works:
                works.remove(work)
                if not works:
                    del self._waiting[owner]


def _finish(work: _Work) -> None:
    try:
        result = work.call()
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the result
        work.result.set_exception(error)
    else:
        work.result.set_result(result)
