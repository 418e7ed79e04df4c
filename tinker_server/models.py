"""The served base models, and the models trained on them: which are in memory, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from backends.protocol import BaseModel, ModelLost, Trainer
from tinker_server.db.tables import TrainingRun
from tinker_server.errors import LostModel, UnknownBaseModel
from tinker_server.store.runs import RunStore


class Models:
    """A trainer works for one model at a time; asyncio's lock is fair, so models take turns."""

    def __init__(self, served: Mapping[str, BaseModel], runs: RunStore) -> None:
        self.served = served
        self._runs = runs
        locks = {id(base.trainer): asyncio.Lock() for base in served.values()}
        self._turns = {name: locks[id(base.trainer)] for name, base in served.items()}

    def base(self, name: str) -> BaseModel:
        """Raises UnknownBaseModel."""
        if name not in self.served:
            raise UnknownBaseModel(f"base model {name!r} is not served here; served: {', '.join(self.served)}")
        return self.served[name]

    @asynccontextmanager
    async def turn(self, base_model: str) -> AsyncIterator[Trainer]:
        """The trainer of a base model, for this caller alone."""
        base = self.base(base_model)
        async with self._turns[base_model]:
            yield base.trainer

    @asynccontextmanager
    async def training(self, model_id: str) -> AsyncIterator[tuple[TrainingRun, Trainer]]:
        """A model and its trainer, for this caller alone. Raises UnknownModel, LostModel, UnknownBaseModel."""
        run = await self._runs.get(model_id)
        async with self.turn(run.base_model) as trainer:
            try:
                if run.status == "lost":
                    raise ModelLost("the process that held it has ended")
                yield run, trainer
            except ModelLost as error:
                if run.status != "lost":
                    await self._runs.mark_lost(model_id)
                raise LostModel(
                    f"model {model_id} is no longer in memory ({error}); create it again from a checkpoint"
                ) from error
