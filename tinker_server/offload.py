"""Run long work in a thread, so that the event loop stays responsive: each owner's in turn.

Whatever a request costs in processor time, its owner's next request waits for it, and no other owner's does. So all
work on what a client has sent, or asks to see, belongs here; `asyncio.to_thread` is for the disk and for the server's
own work, whose threads no owner can take.
"""

from collections.abc import Callable
from typing import TypeVar

from tinker_server.backends.processes.fair_threads import FairThreads

T = TypeVar("T")
INLINE_BYTES = 1 << 10
"""Input up to this size is decoded in a few milliseconds at most; a thread adds 0.1 ms."""
LARGE = INLINE_BYTES + 1
"""Size to give for work that is slow whatever its size."""
AT_ONCE = 4
"""Threads for requests, however many processors there are: they share one interpreter with the event loop."""
FILES_AT_ONCE = 4
"""Threads that convert and encrypt weights, which takes seconds: not even their owner's requests wait for that."""
LONG_S = 0.1
"""Processor time of a call that may have kept the interpreter to itself, as the parsing of a million numbers does."""
_REQUESTS = FairThreads(AT_ONCE, "requests", long_s=LONG_S)
_FILES = FairThreads(FILES_AT_ONCE, "weights")


async def off_loop(owner: str, size_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Call the function for an owner, in a thread if its input is large."""
    if size_bytes <= INLINE_BYTES:
        return function(*args)
    return await _REQUESTS.run(owner, function, *args)


async def on_files(owner: str, function: Callable[..., T], *args: object) -> T:
    """Call a function that takes long over an owner's files of weights, in a thread."""
    return await _FILES.run(owner, function, *args)
