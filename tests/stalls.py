"""Measures stalls of the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

STEP_S = 0.002


@dataclass
class Stall:
    seconds: float = 0.0


@asynccontextmanager
async def longest_stall() -> AsyncIterator[Stall]:
    """The longest time within the block in which a task that was ready had to wait."""
    stall = Stall()

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(STEP_S)
            stall.seconds = max(stall.seconds, time.perf_counter() - before - STEP_S)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield stall
    finally:
        await asyncio.sleep(STEP_S)
        watching.cancel()


async def longest_stall_until(done: asyncio.Event) -> float:
    """Return the loop's longest stall in seconds while this process was at work.

    Other processes of a busy machine cause no stall of ours: they do not add to this process's own time.
    """
    longest, pause_s = 0.0, 0.001
    while not done.is_set():
        wall, own = time.perf_counter(), time.process_time()
        await asyncio.sleep(pause_s)
        longest = max(longest, min(time.perf_counter() - wall - pause_s, time.process_time() - own))
    return longest
