"""What is done when the server is told to stop, so that the next one goes on where it was."""

import asyncio
import contextlib
import logging

from tinker_server.errors import DatabaseUnavailable, Superseded
from tinker_server.models.dispatcher import Scheduler
from tinker_server.models.snapshots import Snapshots
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.runs import RunStore

log = logging.getLogger(__name__)
STORE_S, SUSPEND_S = 2.0, 3.0
"""For the last results to be stored, and for models to be moved to disk: `docker stop` kills after 10 s."""


async def stop_work(
    scheduler: Scheduler, futures: FutureStore, runs: RunStore, snapshots: Snapshots, drain_s: float
) -> None:
    """Let running work end for a while, store and answer what it gave, and move the models that are idle to disk."""
    await scheduler.drain(drain_s)
    with contextlib.suppress(TimeoutError, DatabaseUnavailable):
        async with asyncio.timeout(STORE_S):
            await futures.queue.flush()
            await futures.rows.clear_tries()
    futures.release()
    idle = [run for run in await runs.in_memory() if scheduler.is_settled(run.model_id)]
    outcomes: list[BaseException | None] = []
    try:
        async with asyncio.timeout(SUSPEND_S):
            outcomes = await asyncio.gather(*(snapshots.suspend(run.model_id) for run in idle), return_exceptions=True)
    except TimeoutError:
        log.warning("not all models were moved to disk within %.0f s", SUSPEND_S)
    for run, outcome in zip(idle, outcomes, strict=False):
        if outcome is not None and not isinstance(outcome, Superseded):
            log.error("model %s could not be moved to disk", run.model_id, exc_info=outcome)
