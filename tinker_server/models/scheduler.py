"""Accepts operations and hands them on: a model's to its actor, samples to tasks that start at once.

It also asks the actors for what is no operation: moving models to disk and back, dropping them, and stopping.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import replace

from api_schemas.sampling import SampleRequest
from backends.protocol import ModelLost, Trainer
from tinker_server.errors import (
    BadRequest,
    Busy,
    Cancelled,
    DatabaseUnavailable,
    LostModel,
    ShuttingDown,
    Superseded,
)
from tinker_server.models.actor import Actor
from tinker_server.models.intake import Intake
from tinker_server.models.lane import Lane, lane_after
from tinker_server.models.model import Model, ModelStores
from tinker_server.models.retries import Retries
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Operation, PastOperation, Result
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
        self._admission = intake.admission
        self._queue = stores.futures.queue
        self._actors: dict[str, Actor] = {}
        self._samples: dict[str, tuple[Operation, asyncio.Task[None]]] = {}
        """By request_id, those that wait or run."""
        self._is_closing = False

    async def resume(self, unfinished: list[Operation]) -> None:
        """Take up what an earlier server left: samples, and the operations of models that can still be restored."""
        created = {operation.lane for operation in unfinished if operation.seq_id == 0}
        lanes = {operation.lane for operation in unfinished if operation.operation_kind != "sample"}
        alive = {lane for lane in lanes if lane in created or await self._can_be_restored(lane)}
        self._intake.left.isolate(unfinished)
        for operation in unfinished:
            if operation.operation_kind == "sample":
                await self._resume_sample(operation)
            elif operation.operation_kind == "unload_model":
                self._queue_unload(operation)
            elif operation.lane in alive:
                self._admission.queued.enter(operation.owner, 1, operation.size_bytes, forced=True)
                actor = self.actor(operation.lane)
                actor.queue(await self._lane(actor, operation.seq_id), operation)
            else:
                lost = LostModel(f"model {operation.lane} was unloaded; create it again from a checkpoint")
                self._fail(operation, lost)

    async def _can_be_restored(self, model_id: str) -> bool:
        run = await self._stores.runs.find(model_id)
        return run is not None and run.status != "lost"

    async def _resume_sample(self, operation: Operation) -> None:
        try:
            body = await self._stores.futures.rows.body(operation.request_id)
            again = self._intake.decode(replace(operation, body=body))
        except Exception as error:  # noqa: BLE001 - one that cannot be read any more must not stop the server
            self._fail(operation, error)
            return
        assert isinstance(again.request, SampleRequest)
        # An earlier server let its images in, within the bound; here they count for nothing.
        counts = (again.owner, again.request.num_samples, again.size_bytes, again.image_bytes)
        self._admission.samples.enter(*counts, forced=True)
        self._start_sample(again, again.request.num_samples)

    def require_open(self) -> None:
        """Raise ShuttingDown."""
        if self._is_closing:
            raise ShuttingDown("the server is stopping")

    async def submit(self, operation: Operation) -> str:
        """Accept an operation, durably when this returns, have it run, and return its request_id.

        Raises SequenceConflict, ShuttingDown, BadRequest, Busy.
        """
        self.require_open()
        if operation.operation_kind == "unload_model":  # it makes room
            return await self._submit_unload(operation)
        await self._require_room(operation)
        if isinstance(operation.request, SampleRequest):
            return await self._submit_sample(operation, operation.request.num_samples)
        actor = self.actor(operation.lane)
        lane = actor.lane or await self._lane(actor, operation.seq_id)
        if not lane.takes(operation.operation_kind, operation.seq_id):
            return await self._submit_late(operation)
        try:
            self._admission.queued.enter(operation.owner, 1, operation.size_bytes)
        except Busy:
            if not lane.lets_in(operation.seq_id):
                lane.put_off(operation.seq_id, asyncio.get_running_loop().time())
                raise
            self._admission.queued.enter(operation.owner, 1, operation.size_bytes, forced=True)
        accepted = None
        lane.arriving[operation.seq_id] += 1
        try:
            accepted = await self._queue.enqueue(operation)
        finally:
            lane.arriving[operation.seq_id] -= 1
            if not lane.arriving[operation.seq_id]:
                del lane.arriving[operation.seq_id]
            actor.look_again()
            if accepted is None or not accepted.is_new or self._is_closing:
                self._admission.queued.leave(operation.owner, 1, operation.size_bytes)
                if operation.seq_id not in lane.waiting:
                    lane.let_in.discard(operation.seq_id)
        if accepted.is_new and not self._is_closing:
            self._actors.setdefault(operation.lane, actor)  # it may have been forgotten meanwhile
            actor.queue(lane, replace(operation, request_id=accepted.request_id))
        return accepted.request_id

    async def _require_room(self, operation: Operation) -> None:
        """Raise Busy for new work of an owner that has no room on the disk. A repeat takes none."""
        try:
            await self._intake.disk.require_room(operation.owner, operation.size_bytes + operation.answer_bytes)
        except Busy:
            if await self._stores.futures.rows.knows(operation.lane, operation.seq_id):
                return
            if not isinstance(operation.request, SampleRequest):
                lane = await self._lane(self.actor(operation.lane), operation.seq_id)
                lane.put_off(operation.seq_id, asyncio.get_running_loop().time())
            raise

    async def _submit_late(self, operation: Operation) -> str:
        """Accept a repeat of what was accepted before. Raises BadRequest for what comes now for the first time."""
        late = BadRequest(
            f"{operation.operation_kind} {operation.seq_id} of {operation.lane} comes too late: operations after it"
            " have run, and only a part of a batch whose optim_step was not taken is let in then"
        )
        if not await self._stores.futures.rows.knows(operation.lane, operation.seq_id):
            raise late
        accepted = await self._queue.enqueue(operation)
        if accepted.is_new:  # stored by a commit that had seemed to fail
            self._fail(replace(operation, request_id=accepted.request_id), late)
        return accepted.request_id

    async def _submit_unload(self, operation: Operation) -> str:
        accepted = await self._queue.enqueue(operation)
        if accepted.is_new and not self._is_closing:
            self._queue_unload(replace(operation, request_id=accepted.request_id))
        return accepted.request_id

    async def _submit_sample(self, operation: Operation, num_samples: int) -> str:
        counts = (operation.owner, num_samples, operation.size_bytes, operation.image_bytes)
        self._admission.samples.enter(*counts)
        accepted = None
        try:
            accepted = await self._queue.enqueue(operation)
        finally:
            if accepted is not None and accepted.is_new and not self._is_closing:
                self._start_sample(replace(operation, request_id=accepted.request_id), num_samples)
            else:
                self._admission.samples.leave(*counts)
        return accepted.request_id

    def cancel(self, request_id: str, owner: str) -> bool:
        """Stop a sample of the owner's that waits or runs, whose result then says so. Returns whether there was one."""
        operation, _ = self._samples.get(request_id, (None, None))
        if operation is None or operation.owner != owner:
            return False
        self._cancel_sample(request_id, Cancelled("the sample was cancelled by its client"))
        return True

    def cancel_waiting(self, lanes: Collection[str], error: Exception) -> int:
        """Fail the operations of these models and sampling sessions that wait, and their samples that run. Returns
        their number. A training operation that runs goes on."""
        samples = [request_id for request_id, (operation, _) in self._samples.items() if operation.lane in lanes]
        for request_id in samples:
            self._cancel_sample(request_id, error)
        actors = [actor for model_id, actor in self._actors.items() if model_id in lanes]
        return len(samples) + sum(actor.cancel_waiting(error) for actor in actors)

    def _cancel_sample(self, request_id: str, error: Exception) -> None:
        operation, task = self._samples[request_id]
        self._fail(operation, error)
        task.cancel()

    def _fail(self, operation: Operation, error: Exception) -> None:
        """End an operation that is not run."""
        self._queue.complete(operation.request_id, Result.of_failure(operation, error))

    def in_flight(self) -> Iterator[tuple[Operation, bool]]:
        """Yield all operations that wait or run, each with whether it runs; samples run from their beginning."""
        for actor in self._actors.values():
            yield from actor.in_flight()
        for operation, _ in self._samples.values():
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
            actor = self._actors[model_id] = Actor(model, self._queue, self._intake)
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
        actor = self._actors.get(model_id)
        if actor is not None and actor.lane is not None:
            actor.lane.refuse(seq_id, operation_kind)
            actor.look_again()

    async def restore_lost(self) -> None:
        """Restore models whose trainer has ended once it is there again, for as long as the server lives."""
        async with asyncio.TaskGroup() as following:
            for trainer in self._stores.bases.trainers():
                following.create_task(self._restore_lost_with(trainer))

    async def _restore_lost_with(self, trainer: Trainer) -> None:
        seen, retries = 0, dict[str, Retries]()
        while True:
            seen = await trainer.restarted(seen)
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
        so that the next server goes on where this one was.

        A second call does nothing: what did not end or could not be kept the first time would take as long again.
        """
        if self._is_closing:
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
        self._is_closing = True
        actors = {task: actor for actor in self._actors.values() if (task := actor.stop()) is not None}
        running = {*actors, *(task for _, task in self._samples.values())}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=timeout_s)
        for task in late:
            task.cancel()
            if (actor := actors.get(task)) is not None:
                actor.was_cut_off = True
        if late:  # a trainer's command runs to its end; the end of its process will stop it
            await asyncio.wait(late, timeout=CLOSE_S)

    async def _lane(self, actor: Actor, first: int) -> Lane:
        """Return the actor's lane. One that is not known here begins where its stored operations end."""
        if actor.lane is None:
            lane = await lane_after(self._past(actor.model.id), first)
            actor.lane = actor.lane or lane
        return actor.lane

    async def _past(self, model_id: str) -> AsyncIterator[PastOperation]:
        before = None
        while page := await self._stores.futures.rows.past(model_id, before):
            for operation in page:
                yield operation
            before = page[-1].seq_id

    def _queue_unload(self, operation: Operation) -> None:
        self.actor(operation.lane.removesuffix(UNLOAD_SUFFIX)).queue_unload(operation)

    def _start_sample(self, operation: Operation, num_samples: int) -> None:
        task = asyncio.create_task(self._sample(operation), name=f"sample {operation.request_id}")
        self._samples[operation.request_id] = (operation, task)

        def ended(_: asyncio.Task[None]) -> None:
            del self._samples[operation.request_id]
            self._admission.samples.leave(operation.owner, num_samples, operation.size_bytes, operation.image_bytes)

        task.add_done_callback(ended)

    async def _sample(self, operation: Operation) -> None:
        self._queue.complete(operation.request_id, await self._intake.run(operation, None, ""))
