"""A model in training: whether it is in memory, its snapshots, and what is known of its log.

Only the model's actor calls what changes it, each call after the last, so nothing here is locked.

A snapshot is copied between two operations, when every result of the model has its place in the log or has none, or
while the log is run again, after one of its operations. It is recorded once it is on disk and those results are
stored: what it holds is never run again on it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinker_server.backends.protocol import BackendFailed, LoadedModel, ModelLost, ProcessDied, Trainer
from tinker_server.errors import DatabaseUnavailable, LostModel, ModelIdTaken, UnknownModel
from tinker_server.models.base_models import BaseModels, require_adapter
from tinker_server.models.replay import LogReplay, Replayed, log_changed_numerics
from tinker_server.store.directories import Storage
from tinker_server.store.futures.records import Operation
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import Snapshot, TrainingRun
from tinker_server.store.runs import RunStore

log = logging.getLogger(__name__)
LOGGED: tuple[str, ...] = ("forward_backward", "optim_step", "load_weights")
"""Operations that change a model, apart from making it."""
UNLOADED = LoadedModel("", "", 0, "own", is_lost=True)
"""The handle of a model that its trainer does not hold."""
RETRY_S = 30.0
"""Pause after a snapshot that failed."""
COPYING_PART, WRITING_PART = 0.01, 0.1
"""Parts of the time for which early snapshots of all models may be copied, which delays operations, and written."""


@dataclass(frozen=True)
class SnapshotLimits:
    """The limits of a log: beyond any of them it is too long."""

    every_s: float
    log_bytes: int
    replay_s: float
    """Seconds that running the log again takes, from which an early snapshot is taken if there is time for it."""
    longest_replay_s: float
    """Seconds that it may take."""
    interrupted_s: float
    """Seconds of running the log again that an interruption may cost."""


@dataclass
class Snapshots:
    """The limits and the counts of all models' snapshots."""

    limits: SnapshotLimits
    num_taken: int = 0
    num_failed: int = 0
    early_from: float = 0
    """Time from which there may be another early snapshot."""

    def spend(self, seconds: float) -> None:
        """Postpone the next early snapshot by so many seconds."""
        self.early_from = max(self.early_from, time.monotonic()) + seconds


@dataclass(frozen=True)
class ModelStores:
    """The stores that all models share."""

    bases: BaseModels
    runs: RunStore
    futures: FutureStore
    storage: Storage
    replay: LogReplay
    snapshots: Snapshots


@dataclass
class Log:
    """The counts of a model's log. After a restart it counts as empty until it has been run again."""

    size_bytes: int = 0
    seconds: float = 0
    """Seconds that running it again takes."""
    since: float = field(default_factory=time.monotonic)
    """Time of the snapshot before it, or of the model's first operation in this server."""
    not_before: float = 0
    """Time from which a snapshot may be tried again."""
    is_empty: bool = True
    must_end: bool = False
    """True if replaying the log would not restore the model: a snapshot is due."""

    def add(self, size_bytes: int, seconds: float) -> None:
        """Count a further operation."""
        self.size_bytes += size_bytes
        self.seconds += seconds
        self.is_empty = False


class NoModel:
    """Stands for the model in operations that have none: samples."""

    run = None
    handle = UNLOADED


NO_MODEL = NoModel()


class Model:
    """The state of a model, and what moves it between memory and disk."""

    def __init__(self, model_id: str, stores: ModelStores) -> None:
        self.id = model_id
        self.run: TrainingRun | None = None
        """None until it is looked up, and while there is none."""
        self.log = Log()
        self.is_being_restored = False
        self._stores = stores
        self._trainer: Trainer | None = None
        self.handle = UNLOADED
        """The trainer's latest handle."""
        self._is_whole = False
        """True once it was made or restored to the end, in a trainer that may have died since."""
        self._worked_before_s: float | None = None
        """What the trainer had worked for the model before the running operation; None: that has not begun."""
        self._writing: asyncio.Task[bool] | None = None
        """Writes and records a snapshot; its value is whether it was recorded."""

    @property
    def is_active(self) -> bool:
        """True where the run is recorded as in memory."""
        return self.run is not None and self.run.status == "active"

    @property
    def is_in_memory(self) -> bool:
        """True where the trainer holds the model, unless it has died unnoticed."""
        return self._is_whole and not self.handle.is_lost

    def is_lost_with(self, trainer: Trainer) -> bool:
        """Return whether the model was in this trainer's memory, and the trainer has died."""
        return self._is_whole and self._trainer is trainer and not self.is_in_memory

    @property
    def is_writing(self) -> bool:
        """True while a snapshot is being written or recorded."""
        return self._writing is not None and not self._writing.done()

    async def ensure_loaded(self) -> tuple[TrainingRun, Trainer, LoadedModel]:
        """Return the run, its trainer, and the trainer's handle. A model that is not in memory is restored.

        Raises UnknownModel, LostModel, UnknownBaseModel; ModelLost where the trainer has ended since, and the model
        is restored the next time.
        """
        if not self.is_in_memory:
            run = self.run or await self._find()
            trainer = self._trainer_of(run)
            if run.status == "lost":
                raise LostModel(f"model {self.id} was unloaded or given up; create it again from a checkpoint")
            await self._restore(run, trainer)
        assert self.run is not None and self._trainer is not None, "a model in memory has a run and a trainer"
        self._stores.storage.lease.require()
        self._worked_before_s = self.handle.worked_s
        is_as_made = self.run.trainable.layout == self.handle.layout
        return self.run if is_as_made else self._as_loaded(self.run), self._trainer, self.handle

    def _as_loaded(self, run: TrainingRun) -> TrainingRun:
        """Return the record of the run with the layout of the weights that were loaded into the model."""
        return replace(run, trainable=run.trainable.model_copy(update={"layout": self.handle.layout}))

    async def create(self, run: TrainingRun, weights: Path | None, *, with_optimizer: bool) -> None:
        """Make the model, fresh or of saved weights. It is recorded once it is in memory, and is not in memory unless
        it is recorded. Raises ModelIdTaken."""
        trainer = self._trainer_of(run)
        if await self._stores.runs.find(self.id) is not None:  # before the trainer would lose the model it has
            raise ModelIdTaken(f"{self.id} is in use, for a model or for a copy of weights; take another model_seq_id")
        self.handle = await trainer.create_model(self.id, run.trainable, run.owner)
        try:
            if weights is not None:
                await trainer.load_state(self.handle, weights, with_optimizer=with_optimizer)
            run = self._as_loaded(run)
            await self._stores.runs.add(run)
        except BaseException:
            await trainer.delete_model(self.handle)
            raise
        self.run, self._is_whole = run, True

    async def restore(self) -> None:
        """Restore a model that was lost with its trainer, unless it is there again by now, or not needed.

        Raises LostModel, BackendFailed, DatabaseUnavailable; ModelLost where the trainer has ended again.
        """
        run = self.run or await self._find()
        if run.status == "active" and not self.is_in_memory:
            await self._restore(run, self._trainer_of(run))

    async def suspend(self) -> None:
        """Move the model from memory to disk. If that fails, it is found again by its log, or stays.

        Raises BackendFailed, DatabaseUnavailable.
        """
        run = self.run or await self._find()
        if run.status != "active":
            return
        if self.is_in_memory and not await self._take_and_record() and self.log.must_end:
            raise BackendFailed(f"{self.id} stays in memory: its snapshot failed, and its log alone may not restore it")
        await self._stores.runs.mark_suspended(self.id)
        await self.unload()
        self._stores.futures.changes.note(run.owner)

    async def drop(self) -> None:
        """Forget the model, in memory and on disk. Its checkpoints stay."""
        await self.settle()
        await self._stores.futures.queue.flush()  # a result that is stored later would have a place in an ended log
        run = self.run or await self._find()
        await self.unload()
        await self._stores.runs.mark_lost(self.id)
        await self._find()
        self._stores.futures.changes.note(run.owner)
        if run.snapshot is not None:
            await self._stores.storage.delete(run.snapshot)

    async def unload(self) -> None:
        """Free the model's memory."""
        run = await self._find()
        if self.handle is not UNLOADED:
            await self._trainer_of(run).delete_model(self.handle)
        self.handle, self._is_whole = UNLOADED, False
        self.log = Log()

    async def takes_place_in_log(self, operation: Operation, failure_category: str | None) -> bool:
        """Return whether an operation that has just ended belongs into the log, and count it there."""
        before_s, self._worked_before_s = self._worked_before_s, None
        if operation.operation_kind not in LOGGED or await self._is_gone():
            return False
        if operation.operation_kind == "load_weights":
            # The weights it read may be deleted at any time, so a snapshot takes its place.
            if failure_category is not None or await self._take_and_record():
                return False
            self.log.add(operation.size_bytes, 0)
            self.log.must_end = True
            return True
        # Not what it waited for others: a log that is run again goes before them.
        took_s = 0 if before_s is None or failure_category is not None else self.handle.worked_s - before_s
        self.log.add(operation.size_bytes, max(0, took_s))  # the handle may be new, after a death
        self.log.must_end |= failure_category == "server"
        return True

    async def maybe_snapshot(self, operation_kind: str) -> None:
        """Take a snapshot where an operation has made the log too long. It is written while later operations run.

        After an optim_step there is no gradient to write, so that is the time for it. What a failed restoration has
        made of a model is not the model.
        """
        if not self.is_in_memory or self.log.is_empty or self.is_writing:
            return
        snapshots, now = self._stores.snapshots, time.monotonic()
        limits, times = snapshots.limits, 1 if operation_kind == "optim_step" else 2
        is_long = (
            now - self.log.since > times * limits.every_s
            or self.log.size_bytes > times * limits.log_bytes
            or self.log.seconds > times * limits.longest_replay_s
            or (self.log.seconds > times * limits.replay_s and now > snapshots.early_from)
        )
        if (is_long or self.log.must_end) and now > self.log.not_before:
            await self._take_snapshot(self._stores.futures.queue.last_position)

    async def settle(self) -> bool:
        """Wait until no snapshot is being recorded, and return whether the last was."""
        task, self._writing = self._writing, None
        return task is not None and await asyncio.shield(task)

    async def _is_gone(self) -> bool:
        try:
            return (self.run or await self._find()).status == "lost"
        except UnknownModel:
            return True
        except DatabaseUnavailable:
            return False

    def waits_for(self) -> str | None:
        """Say what its operations wait for beside their turn; None if for nothing."""
        if self._trainer is None:
            return None
        restored = f"model {self.id} is restored from its snapshot and log" if self.is_being_restored else None
        return self._trainer.waits_for() or restored

    async def _find(self) -> TrainingRun:
        """Reload the run from the database into `self.run`. Raises UnknownModel."""
        self.run = run = await self._stores.runs.get(self.id)
        return run

    def _trainer_of(self, run: TrainingRun) -> Trainer:
        """Return the run's trainer. Raises UnknownBaseModel; Superseded where another server has the database, so that
        whatever the trainer computes or writes would be nobody's."""
        if self._trainer is None:
            self._trainer = self._stores.bases.base(run.base_model).trainer
        self._stores.storage.lease.require()
        return self._trainer

    async def _restore(self, run: TrainingRun, trainer: Trainer) -> None:
        """Restore the model, however often the trainer ends meanwhile, as long as each try leaves a newer snapshot."""
        base = self._stores.bases.require_same(run.base_model, run.base_fingerprint, self.id)
        require_adapter(run.trainable, self.id)
        log_changed_numerics(run, base.info.numerics)
        self._is_whole, self.is_being_restored = False, True  # half a model is none
        try:
            run = await self._settle_run()
            while True:
                self.log = Log()
                try:
                    with trainer.restoring(self.id, run.owner):
                        self.handle = await self._stores.replay.load(run, trainer)
                        await self._stores.replay.run_again(trainer, self.handle, self._after_replayed)
                    break
                except (ModelLost, ProcessDied) as error:
                    tried, run = run.snapshot, await self._settle_run()
                    if run.snapshot == tried:
                        raise ModelLost(f"the trainer ended while it restored {self.id}") from error
            if run.status != "active":
                await self._stores.runs.mark_active(self.id)
            self._is_whole = True
            await self._find()
        finally:
            self.is_being_restored = False

    async def _settle_run(self) -> TrainingRun:
        await self.settle()
        return await self._find()

    async def _after_replayed(self, replayed: Replayed) -> None:
        """Take a snapshot where an interruption would cost too much, whatever the operation was."""
        self.log.add(replayed.size_bytes, replayed.seconds)
        self.log.must_end |= replayed.needs_weights
        is_long = self.log.seconds > self._stores.snapshots.limits.interrupted_s
        if is_long and time.monotonic() > self.log.not_before and not self.is_writing:
            await self._take_snapshot(replayed.position)

    async def _take_and_record(self) -> bool:
        """Take a snapshot, wait until it is on disk, and return whether it was recorded."""
        await self.settle()
        await self._take_snapshot(self._stores.futures.queue.last_position)
        return await self.settle()

    async def _take_snapshot(self, position: int) -> None:
        """Copy the model, which holds its log up to this position, and have the copy written and recorded."""
        before, self.log = self.log, Log()
        storage, unless_begun = self._stores.storage, contextlib.ExitStack()
        try:
            with unless_begun:
                run = await self._find()
                directory = await storage.reserve(self.id, "snapshots", "model")
                unless_begun.enter_context(storage.protect(directory))
                snapshot = Snapshot(directory, position, self._as_loaded(run).trainable)
                worked_before_s = self.handle.worked_s
                written = await self._trainer_of(run).snapshot(self.handle, storage.path(directory))
                self._stores.snapshots.spend((self.handle.worked_s - worked_before_s) / COPYING_PART)
                protection = unless_begun.pop_all()
        except Exception as error:  # noqa: BLE001 - the log does without, and the model's operations must go on
            self._put_back(before, error)
            return
        record = self._record(snapshot, before, written, protection)
        self._writing = asyncio.create_task(record, name=f"snapshot of {self.id}")

    async def _record(
        self, snapshot: Snapshot, before: Log, written: Awaitable[None], protection: contextlib.ExitStack
    ) -> bool:
        """Return whether the snapshot was written and recorded. Its directory has `protection` until a row has it."""
        stores, began = self._stores, time.monotonic()
        with protection:
            try:
                await written
                stores.snapshots.spend((time.monotonic() - began) / WRITING_PART)
                await stores.futures.queue.flush()
                if stores.futures.queue.has_unstored(self.id, snapshot.position):
                    return False  # the server stops while the database takes nothing
                run = await self._find()
                numerics = dict(stores.bases.base(run.base_model).info.numerics)
                await stores.runs.set_snapshot(self.id, snapshot, numerics)
                await self._find()
            except Exception as error:  # noqa: BLE001 - likewise
                self._put_back(before, error)
                return False
        stores.snapshots.num_taken += 1
        if run.snapshot is not None:
            with contextlib.suppress(OSError):  # it is listed as unreferenced, and deleted later
                await stores.storage.delete(run.snapshot)
        return True

    def _put_back(self, before: Log, error: Exception) -> None:
        """Go on with the log: what was counted of it counts again."""
        log.warning("model %s: snapshot failed, keeping its log: %s", self.id, error)
        self._stores.snapshots.num_failed += 1
        self.log.size_bytes += before.size_bytes
        self.log.seconds += before.seconds
        self.log.since, self.log.not_before = before.since, time.monotonic() + RETRY_S
        self.log.is_empty &= before.is_empty
        self.log.must_end |= before.must_end
