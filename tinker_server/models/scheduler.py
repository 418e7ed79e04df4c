"""The actors of all models, and the samples: resuming them, stopping them, and moving models to disk and back."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator

from tinker_server.backends.protocol import ModelLost, Trainer
from tinker_server.errors import DatabaseUnavailable, LostModel, ShuttingDown, Superseded
from tinker_server.models.actor import Actor
from tinker_server.models.intake import STOPPING, Intake
from tinker_server.models.model import Model, ModelStores
from tinker_server.models.retries import Retries
from tinker_server.models.samples import Samples
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Operation
from tinker_server.store.records import TrainingRun

log = logging.getLogger(__name__)
RESTORATIONS = 2
"""Restorations of a model under which the trainer ends; after these the model waits for its next operation."""
CLOSE_S = 0.5
"""Seconds that cancelled work gets to end, when the server stops."""
KEEP_S = 3.0
"""Seconds after that to store the last results and move idle models to disk: `docker stop` kills after 10 s."""


class Scheduler:
    """Owns all actors and running samples."""

    def __init__(self, stores: ModelStores, intake: Intake) -> None:
        self._stores = stores
        self._intake = intake
        self._actors: dict[str, Actor] = {}
        self.samples = Samples(intake)

    async def resume(self, unfinished: list[Operation]) -> None:
        """Take up what an earlier server left: samples, and the operations of models that can still be restored."""
        created = {operation.lane for operation in unfinished if operation.seq_id == 0}
        lanes = {operation.lane for operation in unfinished if operation.operation_kind != "sample"}
        alive = {lane for lane in lanes if lane in created or await self._can_be_restored(lane)}
        self._intake.left.isolate(unfinished)
        for operation in unfinished:
            if operation.operation_kind == "sample":
                await self.samples.resume(operation)
            elif operation.operation_kind == "unload_model" or operation.lane in alive:
                await self.actor(operation.lane.removesuffix(UNLOAD_SUFFIX)).resume(operation)
            else:
                lost = LostModel(f"model {operation.lane} was unloaded; create it again from a checkpoint")
                self._intake.fail(operation, lost)

    async def _can_be_restored(self, model_id: str) -> bool:
        run = await self._stores.runs.find(model_id)
        return run is not None and run.status != "lost"

    def require_open(self) -> None:
        """Raise ShuttingDown."""
        if self._intake.is_closing:
            raise ShuttingDown(STOPPING)

    def cancel_waiting(self, lanes: Collection[str], error: Exception) -> int:
        """Fail the operations of these models and sampling sessions that wait, and their samples that run. Returns
        their number. A training operation that runs goes on."""
        actors = [actor for model_id, actor in self._actors.items() if model_id in lanes]
        return self.samples.cancel_all(lanes, error) + sum(actor.cancel_waiting(error) for actor in actors)

    def in_flight(self) -> Iterator[tuple[Operation, bool]]:
        """Yield all operations that wait or run, each with whether it runs; samples run from their beginning."""
        for actor in self._actors.values():
            yield from actor.in_flight()
        for operation, _ in self.samples.running():
            yield operation, True

    def waits_for(self, model_id: str) -> str | None:
        """Say what a model's operations wait for beside their turn; None if for nothing."""
        return None if (actor := self._actors.get(model_id)) is None else actor.model.waits_for()

    def in_memory(self) -> Iterator[tuple[TrainingRun, int]]:
        """Yield the runs whose models a trainer holds, each with its device memory of each rank in bytes."""
        for actor in self._actors.values():
            if actor.model.run is not None and actor.model.is_in_memory:
                yield actor.model.run, actor.model.handle.size_bytes

    @property
    def log_bytes(self) -> int:
        """Bytes of all replay logs. After a restart a log counts once it has been replayed."""
        return sum(actor.model.log.size_bytes for actor in self._actors.values())

    def actor(self, model_id: str) -> Actor:
        """Return the model's actor, which is made where there is none."""
        if (actor := self._actors.get(model_id)) is None:
            model = Model(model_id, self._stores)
            actor = self._actors[model_id] = Actor(model, self._intake)
        return actor

    def is_idle(self, model_id: str, for_s: float) -> bool:
        """Return whether a model has nothing that waits, runs or is not stored, and got nothing new for so long."""
        actor = self._actors.get(model_id)
        return actor is None or (actor.is_idle(for_s) and not self._stores.futures.queue.has_unstored(model_id))

    async def suspend(self, model_id: str) -> None:
        """Move a model from memory to disk, before its next operation. Raises BackendFailed, DatabaseUnavailable."""
        actor = self.actor(model_id)
        await actor.ask(actor.model.suspend)

    async def drop(self, model_id: str) -> None:
        """Forget a model, in memory and on disk, before its next operation. Raises as `suspend`."""
        actor = self.actor(model_id)
        await actor.ask(actor.model.drop)

    def forget(self, model_id: str) -> None:
        """Let go the actor of a model that is gone for good, unless something has just arrived."""
        if self.is_idle(model_id, 0):
            self._actors.pop(model_id, None)

    async def forget_gone(self) -> None:
        """Let go the actors of all models that are gone for good, as those that were unloaded."""
        for model_id, actor in list(self._actors.items()):
            if not actor.model.is_in_memory and not await self._can_be_restored(model_id):
                self.forget(model_id)

    def refuse_number(self, model_id: str, seq_id: int, operation_kind: str) -> None:
        """Note that an operation was refused before it had a future, so that none waits for it."""
        if (actor := self._actors.get(model_id)) is not None:
            actor.refuse(seq_id, operation_kind)

    async def restore_lost(self) -> None:
        """Restore models whose trainer has ended once it is there again, for as long as the server lives."""
        async with asyncio.TaskGroup() as following:
            for trainer in self._stores.bases.trainers():
                following.create_task(self._restore_lost_with(trainer))

    async def _restore_lost_with(self, trainer: Trainer) -> None:
        seen, retries = 0, dict[str, Retries]()
        while True:
            seen = await trainer.wait_for_restart(seen)
            lost = [model_id for model_id, actor in self._actors.items() if actor.model.is_lost_with(trainer)]
            retries = {model_id: Retries(losses=RESTORATIONS) for model_id in lost} | retries
            for model_id in list(retries):
                actor = self.actor(model_id)
                try:
                    await actor.ask(actor.model.restore)
                except ModelLost as error:
                    if retries[model_id].allow(error):
                        break  # the trainer will be there again
                    log.error("model %s not restored, retrying at its next operation: %s", model_id, error)
                except Exception:  # one model must not stop the others
                    log.exception("model %s not restored, retrying at its next operation", model_id)
                del retries[model_id]

    async def stop(self, drain_s: float) -> None:
        """Let running work end for a while, store and answer what it gave, and move the models that are idle to disk,
        so that the next server goes on where this server was.

        A second call does nothing: what did not end or could not be kept the first time would take as long again.
        """
        if self._intake.is_closing:
            return
        await self._drain(drain_s)
        futures, until_s = self._stores.futures, asyncio.get_running_loop().time() + KEEP_S
        with contextlib.suppress(TimeoutError, DatabaseUnavailable):
            async with asyncio.timeout_at(until_s):
                await futures.queue.flush()
                await futures.rows.clear_tries()
        futures.release()
        idle = [
            model_id
            for model_id, actor in self._actors.items()
            if actor.model.is_active and actor.is_settled and not futures.queue.has_unstored(model_id)
        ]
        outcomes: list[BaseException | None] = []
        try:
            async with asyncio.timeout_at(until_s):
                outcomes = await asyncio.gather(*map(self.suspend, idle), return_exceptions=True)
        except TimeoutError:
            log.warning("not all models were moved to disk within %.0f s", KEEP_S)
            for task in filter(None, [actor.stop() for actor in self._actors.values()]):
                task.cancel()
        for model_id, outcome in zip(idle, outcomes, strict=False):
            if outcome is not None and not isinstance(outcome, Superseded):
                log.error("model %s could not be moved to disk", model_id, exc_info=outcome)

    async def _drain(self, timeout_s: float) -> None:
        """Begin nothing more; let what runs end, and stop it after `timeout_s`. The rest stays queued."""
        self._intake.is_closing = True
        actors = {task: actor for actor in self._actors.values() if (task := actor.stop()) is not None}
        running = {*actors, *(task for _, task in self.samples.running())}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=timeout_s)
        for task in late:
            task.cancel()
            if (actor := actors.get(task)) is not None:
                actor.was_cut_off = True
        if late:  # a trainer's command runs to its end; the end of its process will stop it
            await asyncio.wait(late, timeout=CLOSE_S)
