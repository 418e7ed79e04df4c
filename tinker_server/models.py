"""The served base models, and the models trained on them: which are in memory or on disk, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from backends.protocol import BaseModel, ModelLost, Trainer
from tinker_server.errors import LostModel, OtherBaseModel, UnknownBaseModel
from tinker_server.store.directories import Storage
from tinker_server.store.records import TrainingRun
from tinker_server.store.runs import RunStore


class Models:
    """One thing at a time is done to a model; what trainers do for several models at once is theirs to say."""

    def __init__(self, served: Mapping[str, BaseModel], runs: RunStore, storage: Storage) -> None:
        self.served = served
        self._runs = runs
        self._storage = storage
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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
        lock = self._locks.setdefault(model_id, asyncio.Lock())
        async with lock:
            yield base.trainer

    def last_turn(self, model_id: str) -> int:
        """A number that changes when a trainer begins to work for a model."""
        trainers = {id(base.trainer): base.trainer for base in self.served.values()}
        return max((trainer.last_turn(model_id) for trainer in trainers.values()), default=0)

    async def suspend(self, model_id: str) -> None:
        """Move a model from memory to disk. Nothing happens where it is not in memory.

        The run names its snapshot before there is one, and the snapshot appears whole: whatever fails or crashes after
        that, the model is found again. Raises BackendFailed, DatabaseUnavailable.
        """
        run = await self._runs.get(model_id)
        async with self.alone(run.base_model, model_id) as trainer:
            run = await self._runs.get(model_id)
            if run.status != "active":
                return
            if not self._is_on_disk(run):
                snapshot = await self._storage.reserve(model_id, "suspended", "model")
                await self._runs.set_snapshot(model_id, snapshot)
                try:
                    await trainer.suspend(model_id, self._storage.path(snapshot))
                except ModelLost:
                    await self._runs.mark_lost(model_id)
                    return
            await self._runs.mark_suspended(model_id)

    async def drop(self, model_id: str) -> None:
        """Forget a model, in memory and on disk. Its checkpoints stay."""
        run = await self._runs.get(model_id)
        async with self.alone(run.base_model, model_id) as trainer:
            await trainer.delete_model(model_id)
            snapshot = (await self._runs.get(model_id)).snapshot
            await self._runs.mark_lost(model_id)
        if snapshot is not None:
            await self._storage.delete(snapshot)

    def _is_on_disk(self, run: TrainingRun) -> bool:
        """Also where the database could not be told so."""
        return run.snapshot is not None and self._storage.holds(run.snapshot)

    async def _resume(self, run: TrainingRun, trainer: Trainer) -> TrainingRun:
        if run.snapshot is None or not self._is_on_disk(run):
            raise ModelLost("its snapshot was deleted")
        self.require_same(run.base_model, run.base_fingerprint, run.model_id)
        await trainer.resume(run.model_id, run.trainable, run.owner, self._storage.path(run.snapshot))
        await self._runs.mark_active(run.model_id)
        await self._storage.delete(run.snapshot)
        return await self._runs.get(run.model_id)

    @asynccontextmanager
    async def training(self, model_id: str) -> AsyncIterator[tuple[TrainingRun, Trainer]]:
        """A model and its trainer, for this caller alone; a suspended one comes back from disk.

        Raises UnknownModel, LostModel, UnknownBaseModel.
        """
        run = await self._runs.get(model_id)
        async with self.alone(run.base_model, model_id) as trainer:
            run = await self._runs.get(model_id)  # it may have been suspended or lost meanwhile
            try:
                if run.status == "lost":
                    raise ModelLost("it was unloaded, or the process that held it has ended")
                if run.status == "suspended" or self._is_on_disk(run):
                    run = await self._resume(run, trainer)
                yield run, trainer
            except ModelLost as error:
                if run.status != "lost":
                    await self._runs.mark_lost(model_id)
                raise LostModel(
                    f"model {model_id} is no longer in memory ({error}); create it again from a checkpoint"
                ) from error
