"""The served base models, and the models trained on them: which are in memory or on disk, and whose turn it is."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from api_schemas.training import LoraConfig
from backends.protocol import BaseModel, ModelLost, Trainer
from tinker_server.errors import LostModel, UnknownBaseModel
from tinker_server.store.directories import Storage
from tinker_server.store.runs import RunStore
from tinker_server.store.tables import Checkpoint, TrainingRun
from tinker_server.turns import FairTurns


def lora_of(row: TrainingRun | Checkpoint) -> LoraConfig:
    """The shape of a model's adapter."""
    return LoraConfig(
        rank=row.lora_rank,
        seed=row.lora_seed,
        train_unembed=row.train_unembed,
        train_mlp=row.train_mlp,
        train_attn=row.train_attn,
    )


class Models:
    """A trainer works for one model at a time; owners take turns on it, and then their models."""

    def __init__(self, served: Mapping[str, BaseModel], runs: RunStore, storage: Storage) -> None:
        self.served = served
        self._runs = runs
        self._storage = storage
        turns = {id(base.trainer): FairTurns() for base in served.values()}
        self._turns = {name: turns[id(base.trainer)] for name, base in served.items()}

    def base(self, name: str) -> BaseModel:
        """Raises UnknownBaseModel."""
        if name not in self.served:
            raise UnknownBaseModel(f"base model {name!r} is not served here; served: {', '.join(self.served)}")
        return self.served[name]

    @asynccontextmanager
    async def turn(self, base_model: str, owner: str, model_id: str) -> AsyncIterator[Trainer]:
        """The trainer of a base model, for one model of an owner alone."""
        base = self.base(base_model)
        async with self._turns[base_model].turn(owner, model_id):
            yield base.trainer

    def last_turn(self, owner: str, model_id: str) -> int:
        """A number that changes when a trainer begins to work for a model."""
        return max((turns.last_turn(owner, model_id) for turns in self._turns.values()), default=0)

    async def suspend(self, run: TrainingRun) -> None:
        """Move a model from memory to disk. Nothing happens where it is not in memory."""
        async with self.turn(run.base_model, run.owner, run.model_id) as trainer:
            if run.status != "active":
                return
            snapshot = self._storage.fresh(run.model_id, "suspended", "model")
            try:
                await trainer.suspend(run.model_id, self._storage.path(snapshot))
            except ModelLost:
                await self._runs.mark_lost(run.model_id)
                return
            await self._runs.mark_suspended(run.model_id, snapshot)

    async def drop(self, run: TrainingRun) -> None:
        """Forget a model, in memory and on disk. Its checkpoints stay."""
        async with self.turn(run.base_model, run.owner, run.model_id) as trainer:
            await trainer.delete_model(run.model_id)
            snapshot = run.snapshot
            await self._runs.mark_lost(run.model_id)
        if snapshot is not None:
            await self._storage.delete(snapshot)

    async def _resume(self, run: TrainingRun, trainer: Trainer) -> None:
        snapshot = run.snapshot
        assert snapshot is not None, "a suspended model has a snapshot"
        if not self._storage.holds(snapshot):
            raise ModelLost("its snapshot was deleted")
        await trainer.resume(run.model_id, lora_of(run), self._storage.path(snapshot))
        await self._runs.mark_active(run.model_id)
        await self._storage.delete(snapshot)

    @asynccontextmanager
    async def training(self, model_id: str) -> AsyncIterator[tuple[TrainingRun, Trainer]]:
        """A model and its trainer, for this caller alone; a suspended one comes back from disk.

        Raises UnknownModel, LostModel, UnknownBaseModel.
        """
        run = await self._runs.get(model_id)
        async with self.turn(run.base_model, run.owner, run.model_id) as trainer:
            try:
                if run.status == "lost":
                    raise ModelLost("it was unloaded, or the process that held it has ended")
                if run.status == "suspended":
                    await self._resume(run, trainer)
                yield run, trainer
            except ModelLost as error:
                if run.status != "lost":
                    await self._runs.mark_lost(model_id)
                raise LostModel(
                    f"model {model_id} is no longer in memory ({error}); create it again from a checkpoint"
                ) from error
