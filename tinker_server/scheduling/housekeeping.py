"""What clients leave behind: models in memory, and sampler weights without a name.

A client that only paused (a debugger, a lost network) finds its model again: it comes back from disk with its
next operation, gradient and optimizer as they were.
"""

import logging
from collections.abc import Awaitable

from backends.protocol import BackendFailed
from tinker_server.models import Models
from tinker_server.scheduling.scheduler import Scheduler
from tinker_server.store.directories import Storage
from tinker_server.store.runs import RunStore
from tinker_server.store.sessions import SamplerStore, SessionStore
from tinker_server.store.tables import TrainingRun

log = logging.getLogger(__name__)
HOUR_S, DAY_S = 3600, 24 * 3600
SNAPSHOT_KEPT_S = 7 * DAY_S
"""How long a suspended model waits for its client."""
UNNAMED_KEPT_S = 6 * HOUR_S
"""How long sampler weights without a name, of which a training loop may save one set a step, go unused."""
SILENT_S = DAY_S
"""A session without a heartbeat for so long samples no more."""


class Reaper:
    """Looks at all sessions from time to time."""

    def __init__(
        self,
        sessions: SessionStore,
        runs: RunStore,
        samplers: SamplerStore,
        models: Models,
        scheduler: Scheduler,
        storage: Storage,
        timeout_s: float,
    ) -> None:
        self._sessions = sessions
        self._runs = runs
        self._samplers = samplers
        self._models = models
        self._scheduler = scheduler
        self._storage = storage
        self._timeout_s = timeout_s

    async def sweep(self, now: float) -> None:
        """Drop the models of finished sessions, suspend those of silent ones, delete unused sampler weights."""
        for run in self._runs.in_memory():
            session = await self._sessions.get(run.session_id)
            if session.finished_at is not None:
                if self._scheduler.is_idle(run.model_id, 0):
                    await self._drop(run, "its session is finished")
                continue
            silent = await self._sessions.last_heartbeat(run.session_id) < now - self._timeout_s
            # Who sends no heartbeats but works, by curl for example, is not silent.
            if silent and self._scheduler.is_idle(run.model_id, self._timeout_s):
                await self._try("suspended, for its client is silent", run, self._models.suspend(run))
        await self._sessions.save_heartbeats()
        for run in await self._runs.suspended_since_before(now - SNAPSHOT_KEPT_S):
            await self._drop(await self._runs.get(run.model_id), "its client did not come back")
        for directory in await self._samplers.take_unused(now - UNNAMED_KEPT_S, now - SILENT_S):
            await self._storage.delete(directory)

    async def _drop(self, run: TrainingRun, why: str) -> None:
        await self._try(f"dropped, for {why}", run, self._models.drop(run))
        self._scheduler.forget(run.model_id)

    async def _try(self, what: str, run: TrainingRun, change: Awaitable[None]) -> None:
        try:
            await change
        except BackendFailed:  # one model must not stop the others
            log.exception("model %s could not be %s", run.model_id, what)
        else:
            log.info("model %s was %s", run.model_id, what)
