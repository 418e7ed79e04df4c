"""The served base models, and the models trained on them: which are in memory or on disk, and whose turn it is."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from backends.protocol import BaseModel, ModelLost, ProcessDied, Trainer
from tinker_server.errors import LostModel, OtherBaseModel, UnknownBaseModel
from tinker_server.models.restore import Recovery, Rerun, RerunHearer
from tinker_server.observability.tracing.hooks import note
from tinker_server.store.directories import Storage
from tinker_server.store.records import TrainingRun
from tinker_server.store.runs import RunStore


async def _unheard(rerun: Rerun) -> None:
    """Nobody listens."""


class Models:
    """One thing at a time is done to a model; what trainers do for several models at once is theirs to say."""

    def __init__(self, served: Mapping[str, BaseModel], runs: RunStore, storage: Storage, recovery: Recovery) -> None:
        self.served = served
        self._runs = runs
        self._storage = storage
        self._recovery = recovery
        self._held: dict[str, str] = {}
        """What the trainers have in memory, unless they have died since; with its base model."""
        self.spent_s: dict[str, float] = {}
        """By model, seconds of the trainer's work for its last operation, which nobody has counted yet."""
        self.follow_restoration: Callable[[TrainingRun, Trainer], RerunHearer] = lambda run, trainer: _unheard
        """Called before a model is restored, with the trainer to use meanwhile: the model is taken."""
        self._writing: dict[str, asyncio.Task[bool]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._order: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def base(self, name: str) -> BaseModel:
        """Raises UnknownBaseModel."""
        if name not in self.served:
            raise UnknownBaseModel(f"base model {name!r} is not served here; served: {', '.join(self.served)}")
        return self.served[name]

    def require_same(self, base_model: str, fingerprint: str | None, what: str) -> None:
        """Refuse what was made on other weights of the base model; what is older than fingerprints passes.

        Raises UnknownBaseModel, OtherBaseModel.
        """
        served = self.base(base_model).info.fingerprint
        if fingerprint not in (None, served):
            raise OtherBaseModel(
                f"{what} is of another {base_model} than the one served under this name now: its weights differ"
            )

    @asynccontextmanager
    async def alone(self, base_model: str, model_id: str) -> AsyncIterator[Trainer]:
        """The trainer of a base model; nothing else is done to this model meanwhile."""
        base = self.base(base_model)
        note(base_model=base_model)
        lock = self._locks.setdefault(model_id, asyncio.Lock())
        async with lock:
            self._storage.require_lease()  # what it computes or writes would be nobody's
            yield base.trainer

    def last_turn(self, model_id: str) -> int:
        """A number that changes when a trainer begins to work for a model."""
        return max((trainer.last_turn(model_id) for trainer in self.trainers()), default=0)

    def worked_s(self, model_id: str) -> float:
        """Seconds that trainers have worked for a model since it was loaded."""
        trainers = {id(base.trainer): base.trainer for base in self.served.values()}
        return sum(trainer.worked_s(model_id) for trainer in trainers.values())

    @asynccontextmanager
    async def undisturbed(self, model_id: str) -> AsyncIterator[None]:
        """Between two operations of a model, or while one runs until its result is known: for one caller at a time.

        Who writes, drops or runs a model holds this, so that every snapshot is of a known place in the model's log.
        """
        lock = self._order.setdefault(model_id, asyncio.Lock())
        async with lock:
            yield

    async def snapshot(self, run: TrainingRun, directory: str) -> Awaitable[None]:
        """Copy a model, undisturbed, and have it written; what is returned is done once the directory is there.

        Raises BackendFailed, ModelLost where it is not in memory.
        """
        async with self.alone(run.base_model, run.model_id) as trainer, self._watching(run.model_id):
            return await trainer.snapshot(run.model_id, self._storage.path(directory))

    async def unload(self, run: TrainingRun) -> None:
        """Free a model's memory, undisturbed."""
        async with self.alone(run.base_model, run.model_id) as trainer:
            await trainer.delete_model(run.model_id)
            self._held.pop(run.model_id, None)

    async def drop(self, model_id: str) -> None:
        """Forget a model, in memory and on disk. Its checkpoints stay."""
        async with self.undisturbed(model_id):
            await self.settle(model_id)
            run = await self._runs.get(model_id)
            await self.unload(run)
            await self._runs.mark_lost(model_id)
        if run.snapshot is not None:
            await self._storage.delete(run.snapshot)

    def holds(self, model_id: str) -> bool:
        """Whether a model is in memory, unless its trainer has died unnoticed."""
        return model_id in self._held

    def writing(self, model_id: str, record: Coroutine[None, None, bool]) -> None:
        """A snapshot is being written, and recorded by `record`, which says whether it was."""
        self._writing[model_id] = asyncio.create_task(record, name=f"snapshot of {model_id}")

    def is_writing(self, model_id: str) -> bool:
        """Whether a snapshot is being written or recorded."""
        return model_id in self._writing and not self._writing[model_id].done()

    async def settle(self, model_id: str) -> bool:
        """Returns once no snapshot is being recorded; whether the last one was."""
        task = self._writing.pop(model_id, None)
        return task is not None and await asyncio.shield(task)

    def added(self, run: TrainingRun) -> None:
        """A model was made in the trainer, and is recorded."""
        self._held[run.model_id] = run.base_model

    @asynccontextmanager
    async def _watching(self, model_id: str) -> AsyncIterator[None]:
        """What the trainer says of a model that it does not hold any more is noted."""
        try:
            yield
        except (ModelLost, ProcessDied):
            self._held.pop(model_id, None)
            raise

    async def _restore(self, run: TrainingRun, trainer: Trainer) -> TrainingRun:
        """However often the trainer ends meanwhile, as long as each try leaves a newer snapshot."""
        self.require_same(run.base_model, run.base_fingerprint, run.model_id)
        numerics = self.base(run.base_model).info.numerics
        run = await self._settled(run.model_id)
        while True:
            try:
                await self._recovery.restore(run, trainer, numerics, self.follow_restoration(run, trainer))
                break
            except (ModelLost, ProcessDied) as error:
                tried, run = run.snapshot, await self._settled(run.model_id)
                if run.snapshot == tried:
                    raise ModelLost(f"the trainer ended while it restored {run.model_id}") from error
        if run.status != "active":
            await self._runs.mark_active(run.model_id)
        self.added(run)
        return await self._runs.get(run.model_id)

    async def _settled(self, model_id: str) -> TrainingRun:
        await self.settle(model_id)
        return await self._runs.get(model_id)

    def trainers(self) -> list[Trainer]:
        """Each once: names that share a directory share one."""
        return list({id(base.trainer): base.trainer for base in self.served.values()}.values())

    def lost_with(self, trainer: Trainer) -> list[str]:
        """The models that are gone because their trainer has ended."""
        held = [model_id for model_id, name in self._held.items() if self.served[name].trainer is trainer]
        return [model_id for model_id in held if not trainer.holds(model_id)]

    async def bring_back(self, model_id: str) -> None:
        """Restore a model that was lost with its trainer, unless somebody has by now, or it is not needed.

        Raises LostModel, BackendFailed, DatabaseUnavailable; ModelLost where the trainer has ended again.
        """
        async with self.undisturbed(model_id):
            run = await self._runs.get(model_id)
            async with self.alone(run.base_model, model_id) as trainer:
                run = await self._runs.get(model_id)
                if run.status != "active" or (model_id in self._held and trainer.holds(model_id)):
                    return
                self._held.pop(model_id, None)  # if it fails half-way, it is there and not whole
                await self._restore(run, trainer)

    @asynccontextmanager
    async def training(self, model_id: str) -> AsyncIterator[tuple[TrainingRun, Trainer]]:
        """A model and its trainer, for this caller alone. One that is not in memory is restored.

        Raises UnknownModel, LostModel, UnknownBaseModel; ModelLost where the trainer has ended since, and the model
        will be restored the next time.
        """
        run = await self._runs.get(model_id)
        async with self.alone(run.base_model, model_id) as trainer:
            run = await self._runs.get(model_id)  # it may have been lost meanwhile
            if run.status == "lost":
                raise LostModel(f"model {model_id} was unloaded or given up; create it again from a checkpoint")
            if model_id not in self._held:
                run = await self._restore(run, trainer)
            began = time.monotonic()
            async with self._watching(model_id):
                yield run, trainer
            self.spent_s[model_id] = time.monotonic() - began
