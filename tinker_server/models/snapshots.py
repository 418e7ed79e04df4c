"""When a model's snapshot is taken, so that its log stays short; and suspending, which is a snapshot and no memory.

A snapshot is copied between two operations, when every result of the model has its place in the log or has none. It
is recorded once it is on disk and those results are stored: what it holds is never run again on it.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from tinker_server.errors import DatabaseUnavailable
from tinker_server.models.registry import Models
from tinker_server.store.directories import Storage
from tinker_server.store.futures.records import Operation
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import TrainingRun
from tinker_server.store.runs import RunStore

log = logging.getLogger(__name__)
LOGGED: tuple[str, ...] = ("forward_backward", "optim_step", "load_weights")
"""What changes a model, apart from making it."""
RETRY_S = 30.0
"""After a snapshot that failed."""


@dataclass(frozen=True)
class SnapshotLimits:
    """What of a log is too much."""

    every_s: float
    log_bytes: int
    replay_s: float


@dataclass
class _Log:
    """What is known of a model's log. After a restart it counts as empty until it has been run again."""

    size_bytes: int = 0
    seconds: float = 0
    """To run it again."""
    since: float = field(default_factory=time.monotonic)
    """The snapshot that it follows, or the model's first operation here."""
    not_before: float = 0
    """When a snapshot may be tried again."""
    is_empty: bool = True
    must_end: bool = False
    """It does not give the model exactly: a snapshot is to take its place."""


class Snapshots:
    """Follows the models' logs, and ends them."""

    def __init__(
        self, models: Models, runs: RunStore, futures: FutureStore, storage: Storage, limits: SnapshotLimits
    ) -> None:
        self._models = models
        self._runs = runs
        self._futures = futures
        self._storage = storage
        self._limits = limits
        self._logs: defaultdict[str, _Log] = defaultdict(_Log)
        self.num_taken = self.num_failed = 0

    @property
    def log_bytes(self) -> dict[str, int]:
        """By model, requests that are kept to be run again; those of an earlier server are not counted."""
        return {model_id: found.size_bytes for model_id, found in self._logs.items() if not found.is_empty}

    def undisturbed(self, model_id: str) -> AbstractAsyncContextManager[None]:
        """As `Models.undisturbed`."""
        return self._models.undisturbed(model_id)

    async def logs(self, operation: Operation, failure_category: str | None) -> bool:
        """Whether an operation that has ended is to have a place in its model's log. The model is undisturbed."""
        seconds = self._models.spent_s.pop(operation.lane, 0)
        if operation.operation_kind not in LOGGED or await self._is_gone(operation.lane):
            return False
        if operation.operation_kind == "load_weights":
            # The weights it read may be deleted at any time, so they are kept in place of it.
            return failure_category is None and not await self._taken_and_recorded(operation.lane)
        found = self._logs[operation.lane]
        found.seconds += seconds + self._models.replayed_s.pop(operation.lane, 0)
        found.size_bytes += operation.size_bytes
        found.is_empty = False
        found.must_end |= failure_category == "server"
        return True

    async def _is_gone(self, model_id: str) -> bool:
        try:
            run = await self._runs.find(model_id)
        except DatabaseUnavailable:
            return False
        return run is None or run.status == "lost"

    async def look_after(self, operation: Operation) -> None:
        """Take a snapshot where the log has become long with an operation; it is written aside. The model is
        undisturbed. After a step there is no gradient to write, so that is the time for it."""
        found = self._logs.get(operation.lane)
        if found is None or found.is_empty or self._models.is_writing(operation.lane):
            return
        limits, age_s = self._limits, time.monotonic() - found.since
        parts = (age_s / limits.every_s, found.size_bytes / limits.log_bytes, found.seconds / limits.replay_s)
        is_long = max(parts) > (1 if operation.operation_kind == "optim_step" else 2)
        if (is_long or found.must_end) and time.monotonic() > found.not_before:
            await self._take(operation.lane)

    async def suspend(self, model_id: str) -> None:
        """Move a model from memory to disk. Whatever fails, it stays, or is found again by its log.

        Raises BackendFailed, DatabaseUnavailable.
        """
        async with self._models.undisturbed(model_id):
            run = await self._runs.get(model_id)
            if run.status != "active":
                return
            if self._models.holds(model_id):
                await self._taken_and_recorded(model_id)
            await self._runs.mark_suspended(model_id)
            await self._models.unload(run)
            self._logs.pop(model_id, None)

    async def _taken_and_recorded(self, model_id: str) -> bool:
        await self._models.settle(model_id)
        await self._take(model_id)
        return await self._models.settle(model_id)

    async def _take(self, model_id: str) -> None:
        before, self._logs[model_id] = self._logs[model_id], _Log()
        try:
            run, position = await self._runs.get(model_id), self._futures.queue.last_position
            directory = await self._storage.reserve(model_id, "snapshots", "model")
            written = await self._models.snapshot(run, directory)
        except Exception as error:  # noqa: BLE001 - the log does without, and the model's operations must go on
            self._put_back(model_id, before, error)
            return
        self._models.writing(model_id, self._record(run, directory, position, before, written))

    async def _record(
        self, run: TrainingRun, directory: str, position: int, before: _Log, written: Awaitable[None]
    ) -> bool:
        try:
            await written
            await self._futures.queue.flush()
            if self._futures.queue.has_unstored(run.model_id, position):
                return False  # the server stops while the database takes nothing
            numerics = dict(self._models.base(run.base_model).info.numerics)
            left = (await self._runs.get(run.model_id)).snapshot
            await self._runs.set_snapshot(run.model_id, directory, position, numerics)
        except Exception as error:  # noqa: BLE001 - likewise
            self._put_back(run.model_id, before, error)
            return False
        self.num_taken += 1
        if left is not None:
            with contextlib.suppress(OSError):  # it is listed as unreferenced, and deleted later
                await self._storage.delete(left)
        return True

    def _put_back(self, model_id: str, before: _Log, error: Exception) -> None:
        """The log goes on: what was counted of it counts again."""
        log.warning("model %s has no new snapshot, and its log goes on: %s", model_id, error)
        self.num_failed += 1
        now = self._logs[model_id]
        now.size_bytes += before.size_bytes
        now.seconds += before.seconds
        now.since, now.not_before = before.since, time.monotonic() + RETRY_S
        now.is_empty &= before.is_empty
        now.must_end |= before.must_end
