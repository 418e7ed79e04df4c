"""Run coroutines so that none outlives its caller.

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


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Return the coroutine's result. If the caller is cancelled, wait for its end nevertheless: half a command on a
    process is worse than a result that nobody reads."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody will retrieve
        await asyncio.wait([task])
        raise


async def gather(coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return their results in order. The first failure, or a cancellation of the caller, ends them all before it
    rises."""
    async with running(coroutines) as tasks:
        return await asyncio.gather(*tasks)
