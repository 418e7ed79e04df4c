"""Run coroutines side by side so that none outlives the block.

An asyncio.TaskGroup would do so too, but wraps errors in a group; here the first one rises as it is.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def running(coroutines: Iterable[Coroutine[object, object, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run them as tasks, in order. When the block ends, cancel those that still run, and wait for all."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather(coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return their results in order. The first failure, or a cancellation of the caller, ends them all before it
    rises."""
    async with running(coroutines) as tasks:
        return await asyncio.gather(*tasks)
