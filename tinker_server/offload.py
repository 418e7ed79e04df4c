"""Keeping the event loop free of long work."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
INLINE_BYTES = 64 << 10
"""Up to this size, decoding takes less than a millisecond, and a thread would only add latency."""


async def off_loop(size_bytes: int, function: Callable[..., T], *args: object) -> T:
    """The function's value, from a thread where its input is large."""
    if size_bytes <= INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
