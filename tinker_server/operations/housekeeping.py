"""Moves to disk or deletes from time to time what clients leave behind, and writes counted usage.

A client that only paused (a debugger, a lost network) finds its model again: its next operation restores it from disk,
with gradient and optimizer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinker_server.auth.key_uses import KeyUses
from tinker_server.backends.protocol import BackendFailed
from tinker_server.errors import DatabaseUnavailable
from tinker_server.models.scheduler import Scheduler
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.client_metrics import ClientMetricStore
from tinker_server.store.directories import UNREFERENCED_KEPT_S, Storage
from tinker_server.store.disk_account import DiskAccount
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import TrainingRun
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore, UnnamedLimits
from tinker_server.store.sessions import SessionStore
from tinker_server.store.steps import StepStore
from tinker_server.store.uploads import UploadFolder
from tinker_server.store.usage import UsageStore

log = logging.getLogger(__name__)
SNAPSHOT_KEPT_S = 7 * 24 * 3600
"""A suspended model waits so long for its client."""
ARCHIVE_KEPT_S = 3600.0
"""An archive is kept so long after it was packed. It counts as its weights' owner's, whoever has downloaded it."""
AHEAD_S, HELD_S = 60.0, 24 * 3600.0
"""A jump of more than AHEAD_S is ignored for HELD_S."""


class SteadyClock:
    """A clock in Unix seconds that ignores jumps ahead, so that nothing expires early."""

    def __init__(self) -> None:
        self._epoch = time.time() - time.monotonic()
        self._ahead_since: float | None = None

    def __call__(self) -> float:
        wall, passed = time.time(), time.monotonic()
        ahead = wall - passed - self._epoch
        if ahead <= AHEAD_S:
            self._ahead_since = None
            return wall
        if self._ahead_since is None:
            self._ahead_since = passed
            log.warning("the clock was set ahead by %d s: what is old is deleted a day later", ahead)
        if passed - self._ahead_since >= HELD_S:
            self._epoch = wall - passed
            return wall
        return wall - ahead


@dataclass(frozen=True)
class Periods:
    """Interval of the sweeps, and how long things are kept."""

    every_s: float
    session_timeout_s: float
    """A session without a heartbeat for so long is silent."""
    results_kept_s: float
    steps_kept_s: float
    unnamed: UnnamedLimits


@dataclass(frozen=True)
class Stores:
    """The stores that are swept."""

    sessions: SessionStore
    runs: RunStore
    samplers: SamplerStore
    checkpoints: CheckpointStore
    futures: FutureStore
    usage: UsageStore
    steps: StepStore
    client_metrics: ClientMetricStore
    storage: Storage
    uploads: UploadFolder
    key_uses: KeyUses
    save_samples: Callable[[], Awaitable[None]]
    disk: DiskAccount


class Housekeeper:
    """Sweeps everything that the stores hold, and the models in memory."""

    def __init__(self, stores: Stores, scheduler: Scheduler, periods: Periods, clock: Callable[[], float]) -> None:
        self._stores = stores
        self._scheduler = scheduler
        self._periods = periods
        self._clock = clock

    async def run(self) -> None:
        """Run all sweeps for as long as the server lives. A failure does not stop the others."""
        while True:
            await asyncio.sleep(self._periods.every_s)
            now = self._clock()
            for sweep in (self.sweep_models, self.sweep_weights, self.sweep_records):
                try:
                    await sweep(now)
                except DatabaseUnavailable as error:
                    log.warning("housekeeping failed, retrying: %s", error)
                except Exception:  # the server must not stop for it
                    log.exception("housekeeping failed, retrying")

    async def sweep_models(self, now: float) -> None:
        """Drop the models of finished sessions and of clients that did not come back, suspend those of silent
        clients."""
        stores, timeout_s = self._stores, self._periods.session_timeout_s
        for run in await stores.runs.find_active():
            session = await stores.sessions.get(run.session_id)
            if session.finished_at is not None:
                if self._scheduler.is_idle(run.model_id, 0):
                    await self._drop(run, "its session is finished")
                continue
            silent = await stores.sessions.last_heartbeat(run.session_id) < now - timeout_s
            # A client that sends no heartbeats but works, by curl for example, is not silent.
            if silent and self._scheduler.is_idle(run.model_id, timeout_s):
                why = f"no heartbeat from its client for {timeout_s:.0f} s"
                await self._try(f"moved to disk: {why}", run, self._scheduler.suspend(run.model_id))
        await stores.sessions.save_heartbeats()
        stores.sessions.forget_ended()
        stores.runs.forget_ended()
        await self._scheduler.forget_gone()
        for run in await stores.runs.find_suspended(now - SNAPSHOT_KEPT_S):
            if self._scheduler.is_idle(run.model_id, 0):
                await self._drop(run, "its client did not come back")

    async def sweep_weights(self, now: float) -> None:
        """Delete weights that have expired, or have no name and are not used, directories without a reference, archives
        that were packed long ago, and uploads that nobody finished."""
        storage = self._stores.storage
        await storage.delete(*await self._stores.samplers.take_unused(self._periods.unnamed, now))
        await storage.delete(*await self._stores.checkpoints.take_expired(now))
        await storage.delete_unreferenced(now - UNREFERENCED_KEPT_S)
        await storage.delete_archives(now - ARCHIVE_KEPT_S)
        await self._stores.uploads.delete_expired(now)

    async def sweep_records(self, now: float) -> None:
        """Write counted usage and the uses of keys, and delete old results."""
        await self._stores.usage.save()
        await self._stores.key_uses.save()
        await self._stores.steps.expire(now - self._periods.steps_kept_s)
        await self._stores.client_metrics.expire(now - self._periods.steps_kept_s)
        await self._stores.futures.expire(now - self._periods.results_kept_s)
        await self._stores.disk.sweep(now)
        await self.save_samples()

    async def save_samples(self) -> None:
        """Write the latest samples to disk, as far as it has room. Raises Superseded."""
        self._stores.storage.lease.require()
        try:
            await self._stores.save_samples()
        except OSError as error:
            log.warning("the latest samples are not saved: %s", error)

    async def _drop(self, run: TrainingRun, why: str) -> None:
        await self._try(f"dropped, for {why}", run, self._scheduler.drop(run.model_id))
        self._scheduler.forget(run.model_id)

    async def _try(self, what: str, run: TrainingRun, change: Awaitable[None]) -> None:
        try:
            await change
        except (BackendFailed, DatabaseUnavailable):  # a model must not stop the others
            log.exception("model %s could not be %s", run.model_id, what)
        else:
            log.info("model %s was %s", run.model_id, what)
