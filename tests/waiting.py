"""Waiting for what nobody tells of, by looking again and again."""

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], bool], limit_s: float = 20) -> None:
    """Raises TimeoutError where it does not come to hold."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.02)


def wait_until(holds: Callable[[], bool], limit_s: float = 20) -> None:
    """As `until`, of a test without an event loop."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"it did not happen in {limit_s:.0f} s")
        time.sleep(0.02)
