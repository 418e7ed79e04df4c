"""Run long work in a thread, so that the event loop stays responsive."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
INLINE_BYTES = 1 << 10
"""Input up to this size is decoded in a few milliseconds at most; a thread adds 0.1 ms."""


async def off_loop(size_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Call the function, in a thread if its input is large."""
    if size_bytes <= INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
