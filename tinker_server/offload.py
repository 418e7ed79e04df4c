"""Keeping the event loop free of long work."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
INLINE_BYTES = 1 << 10
"""Up to this size, whatever is in it is decoded in a few milliseconds; a thread adds a tenth of one."""


async def off_loop(size_bytes: int, function: Callable[..., T], *args: object) -> T:
    """The function's value, from a thread where its input is large."""
    if size_bytes <= INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
