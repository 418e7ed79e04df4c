"""What is done when the server is told to stop, so that the next one goes on where it was."""

import asyncio
import contextlib
import logging

from tinker_server.errors import DatabaseUnavailable, Superseded
from tinker_server.scheduling.scheduler import Scheduler
from tinker_server.snapshots import Snapshots
from tinker_server.store.futures import FutureStore
from tinker_server.store.records import TrainingRun
from tinker_server.store.runs import RunStore

log = logging.getLogger(__name__)
KEEP_S = 3.0
"""After that, for the last results to be stored and idle models to be moved to disk: `docker stop` kills after 10 s."""


async def stop_work(
    scheduler: Scheduler, futures: FutureStore, runs: RunStore, snapshots: Snapshots, drain_s: float
) -> None:
    """Let running work end for a while, store and answer what it gave, and move the models that are idle to disk.

    Once: what has not ended or could not be kept then would take as long again.
    """
    if scheduler.is_closing:
        return
    await scheduler.drain(drain_s)
    until_s = asyncio.get_running_loop().time() + KEEP_S
    with contextlib.suppress(TimeoutError, DatabaseUnavailable):
        async with asyncio.timeout_at(until_s):
            await futures.flush()
            await futures.forget_tries()
    futures.release()
    idle: list[TrainingRun] = []
    outcomes: list[BaseException | None] = []
    try:
        async with asyncio.timeout_at(until_s):
            idle = [run for run in await runs.in_memory() if scheduler.is_settled(run.model_id)]
            outcomes = await asyncio.gather(*(snapshots.suspend(run.model_id) for run in idle), return_exceptions=True)
    except TimeoutError:
        log.warning("not all models were moved to disk within %.0f s", KEEP_S)
    for run, outcome in zip(idle, outcomes, strict=False):
        if outcome is not None and not isinstance(outcome, Superseded):
            log.error("model %s could not be moved to disk", run.model_id, exc_info=outcome)
