"""When accepted operations run: each model's in the order of their numbers, samples at once."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

from api_schemas.sampling import SampleRequest
from backends.protocol import BackendFailed, InvalidInput, ModelLost, ProcessDied
from tinker_server.errors import (
    BadRequest,
    Busy,
    Cancelled,
    DatabaseUnavailable,
    GradientIncomplete,
    LostModel,
    ShuttingDown,
    Superseded,
)
from tinker_server.models.admission import Admission
from tinker_server.models.crash_isolation import Suspects
from tinker_server.models.lane import Lane, lane_after
from tinker_server.observability.metrics import Metrics
from tinker_server.observability.tracing.hooks import Tracing
from tinker_server.offload import INLINE_BYTES
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Accepted, Operation, PastOperation, Result
from tinker_server.store.futures.store import FutureStore

log = logging.getLogger(__name__)
MAX_OUTAGES = 4
"""Times that the database gave an operation no answer, each after the half minute for which one is waited."""
MAX_DEATHS, MAX_RESTORATIONS = 2, 5
"""An operation under which the trainer died so often fails alone; so does one whose model so often was not restored."""
CLOSE_S = 1.0
"""For what is cancelled to end, when the server stops."""


class Runner(Protocol):
    """What carries operations out."""

    def decoded(self, operation: Operation) -> Operation:
        """The operation with its request at hand."""

    async def is_to_be_had(self, model_id: str) -> bool:
        """Whether a model is in memory or can be restored."""

    def undisturbed(self, model_id: str) -> AbstractAsyncContextManager[None]:
        """Held while an operation of a model runs, until its place in the model's log is known."""

    async def logs(self, operation: Operation, failure_category: str | None) -> bool:
        """Whether an operation that has ended is to have a place in its model's log."""

    async def look_after(self, operation: Operation) -> None:
        """A model's operation has its result: a snapshot may be due."""

    def last_turn(self, model_id: str) -> int:
        """A number that changes when a trainer begins to work for a model: before, nothing has changed."""

    async def mark_incomplete(self, model_id: str) -> None:
        """Have the model's next optim_step fail and clear the gradient."""

    async def run(self, operation: Operation) -> Result:
        """Raises whatever the operation failed with."""


class Scheduler:
    """Owns every running operation."""

    def __init__(  # noqa: PLR0913
        self,
        futures: FutureStore,
        runner: Runner,
        admission: Admission,
        metrics: Metrics,
        tracing: Tracing,
        gap_grace_s: float,
    ) -> None:
        self._futures = futures
        self._metrics = metrics
        self._tracing = tracing
        self._runner = runner
        self._admission = admission
        self._gap_grace_s = gap_grace_s
        self._suspects = Suspects(futures)
        self._lanes: dict[str, Lane] = {}
        self._samples: dict[str, tuple[Operation, asyncio.Task[None]]] = {}
        """By request_id, those that wait or run."""
        self._unloads: set[asyncio.Task[None]] = set()
        self._cut_off: set[str] = set()
        """Models whose operation was stopped half-way, when the server stopped."""
        self._closing = False

    async def resume(self, unfinished: list[Operation]) -> None:
        """Take up what an earlier server left: samples, and the operations of models that are still to be had."""
        created = {operation.lane for operation in unfinished if operation.seq_id == 0}
        lanes = {operation.lane for operation in unfinished if operation.operation_kind != "sample"}
        alive = {lane for lane in lanes if lane in created or await self._runner.is_to_be_had(lane)}
        self._suspects.take_up(unfinished)
        for operation in unfinished:
            self._tracing.accepted(operation, operation.request_id)
            if operation.operation_kind == "sample":
                await self._resume_sample(operation)
            elif operation.operation_kind == "unload_model":
                self._start_unload(operation)
            elif operation.lane in alive:
                self._admission.enter_queued(operation.owner, operation.size_bytes)
                self._queue(await self._lane(operation), operation)
            else:
                self._fail(
                    operation, LostModel(f"model {operation.lane} was unloaded; create it again from a checkpoint")
                )

    async def _resume_sample(self, operation: Operation) -> None:
        try:
            body = await self._futures.rows.body(operation.request_id)
            again = self._runner.decoded(replace(operation, body=body))
        except Exception as error:  # noqa: BLE001 - one that cannot be read any more must not stop the server
            self._fail(operation, error)
            return
        assert isinstance(again.request, SampleRequest)
        # An earlier server let its images in, within the bound; here they count for nothing.
        self._admission.force_sample(again.owner, again.request.num_samples, again.size_bytes, again.image_bytes)
        self._start_sample(again, again.request.num_samples)

    def require_open(self) -> None:
        """Raises ShuttingDown."""
        if self._closing:
            raise ShuttingDown("the server is stopping")

    async def submit(self, operation: Operation) -> str:
        """Accept an operation, durably when this returns, and have it run; its request_id.

        Raises SequenceConflict, ShuttingDown, BadRequest, Busy.
        """
        self.require_open()
        if isinstance(operation.request, SampleRequest):
            return await self._submit_sample(operation, operation.request.num_samples)
        if operation.operation_kind == "unload_model":
            return await self._submit_unload(operation)
        lane = await self._lane(operation)
        if not lane.takes(operation.operation_kind, operation.seq_id):
            return await self._submit_late(operation)
        accepted = None
        try:
            if not lane.is_awaited(operation.seq_id):  # what all others of its model wait for is always let in
                self._admission.require_queued(operation.owner, operation.size_bytes)
        except Busy:
            lane.put_off(operation.seq_id, asyncio.get_running_loop().time())
            raise
        self._admission.enter_queued(operation.owner, operation.size_bytes)
        lane.arriving[operation.seq_id] += 1
        try:
            accepted = await self._enqueue(operation)
        finally:
            lane.arriving[operation.seq_id] -= 1
            if not lane.arriving[operation.seq_id]:
                del lane.arriving[operation.seq_id]
            lane.arrived.set()
            if accepted is None or not accepted.is_new or self._closing:
                self._admission.leave_queued(operation.owner, operation.size_bytes)
        if accepted.is_new and not self._closing:
            self._queue(
                self._lanes.setdefault(operation.lane, lane), replace(operation, request_id=accepted.request_id)
            )
        return accepted.request_id

    async def _submit_late(self, operation: Operation) -> str:
        """A repeat of what was accepted before. Raises BadRequest for what comes now for the first time."""
        late = BadRequest(
            f"{operation.operation_kind} {operation.seq_id} of {operation.lane} comes too late: operations after it"
            " have run, and only a part of a batch whose optim_step was not taken is let in then"
        )
        if not await self._futures.rows.knows(operation.lane, operation.seq_id):
            raise late
        accepted = await self._enqueue(operation)
        if accepted.is_new:  # stored by a commit that had seemed to fail
            self._fail(replace(operation, request_id=accepted.request_id), late)
        return accepted.request_id

    async def _enqueue(self, operation: Operation) -> Accepted:
        accepted = await self._futures.queue.enqueue(operation)
        if accepted.is_new:
            self._metrics.accepted(operation.operation_kind)
            self._tracing.accepted(operation, accepted.request_id)
        return accepted

    async def _submit_unload(self, operation: Operation) -> str:
        accepted = await self._enqueue(operation)
        if accepted.is_new and not self._closing:
            self._start_unload(replace(operation, request_id=accepted.request_id))
        return accepted.request_id

    async def _submit_sample(self, operation: Operation, num_samples: int) -> str:
        counts = (operation.owner, num_samples, operation.size_bytes, operation.image_bytes)
        self._admission.enter_sample(*counts)
        accepted = None
        try:
            accepted = await self._enqueue(operation)
        finally:
            if accepted is not None and accepted.is_new and not self._closing:
                self._start_sample(replace(operation, request_id=accepted.request_id), num_samples)
            else:
                self._admission.leave_sample(*counts)
        return accepted.request_id

    def cancel(self, request_id: str, owner: str) -> bool:
        """Stop a sample of the owner's that waits or runs, whose result then says so; whether there was one."""
        operation, task = self._samples.get(request_id, (None, None))
        if operation is None or task is None or operation.owner != owner:
            return False
        self._fail(operation, Cancelled("the sample was cancelled by its client"))
        task.cancel()
        return True

    def in_flight(self) -> Iterator[tuple[Operation, bool]]:
        """All operations that wait or run, each with whether it runs; samples run from their beginning."""
        for lane in self._lanes.values():
            if lane.running is not None:
                yield lane.running, True
            for operation in lane.waiting.values():
                yield operation, False
        for operation, _ in self._samples.values():
            yield operation, True

    def is_idle(self, model_id: str, for_s: float) -> bool:
        """Whether a model has nothing that waits, runs or is not stored, and got nothing new for so long."""
        lane = self._lanes.get(model_id)
        if lane is None:
            return True
        if lane.is_busy or self._futures.queue.has_unstored(model_id):
            return False
        return lane.last_arrival_s + for_s <= asyncio.get_running_loop().time()

    def is_settled(self, model_id: str) -> bool:
        """Whether what has been done to a model is stored, and nothing is under way: the rest waits or is to come."""
        lane = self._lanes.get(model_id)
        driven = lane is not None and lane.driver is not None and not lane.driver.done()
        return model_id not in self._cut_off and not driven and not self._futures.queue.has_unstored(model_id)

    def forget(self, model_id: str) -> None:
        """A model is gone for good: drop what is kept of its numbers, unless something has just arrived."""
        if self.is_idle(model_id, 0):
            self._lanes.pop(model_id, None)

    def refuse_number(self, model_id: str, seq_id: int, operation_kind: str) -> None:
        """Note that an operation was refused before it had a future, so that none waits for it."""
        if (lane := self._lanes.get(model_id)) is not None:
            lane.refuse(seq_id, operation_kind)

    async def drain(self, timeout_s: float) -> None:
        """Start nothing more; let what runs end, and stop it after `timeout_s`. The rest stays queued."""
        self._closing = True
        for lane in self._lanes.values():
            lane.arrived.set()
        drivers: dict[asyncio.Task[Any], str] = {}
        for model_id, lane in self._lanes.items():
            if lane.driver is not None and not lane.driver.done():
                drivers[lane.driver] = model_id
                if lane.running is None or self._runner.last_turn(model_id) == lane.last_turn:
                    lane.driver.cancel()  # it waits, and has changed nothing
        samples = {task for _, task in self._samples.values()}
        running = {*drivers, *samples, *self._unloads}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=timeout_s)
        self._cut_off |= {drivers[task] for task in late if task in drivers}
        for task in late:
            task.cancel()
        if late:  # a trainer's command runs to its end; the end of its process will stop it
            await asyncio.wait(late, timeout=CLOSE_S)

    async def _lane(self, operation: Operation) -> Lane:
        """A lane that is not known here begins where its stored operations end."""
        if (lane := self._lanes.get(operation.lane)) is None:
            lane = await lane_after(self._past(operation.lane), operation.seq_id)
            lane = self._lanes.setdefault(operation.lane, lane)
        return lane

    async def _past(self, model_id: str) -> AsyncIterator[PastOperation]:
        before = None
        while page := await self._futures.rows.past(model_id, before):
            for operation in page:
                yield operation
            before = page[-1].seq_id

    def _queue(self, lane: Lane, operation: Operation) -> None:
        if operation.size_bytes > INLINE_BYTES and lane.is_busy:
            operation = replace(operation, body=None, request=None)  # it is in the database
        lane.add(operation, asyncio.get_running_loop().time())
        if lane.driver is None or lane.driver.done():
            lane.driver = asyncio.create_task(self._drive(lane), name=f"lane {operation.lane}")

    async def _drive(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        while lane.waiting and not self._closing:
            if (wait_s := lane.wait_s(loop.time(), self._gap_grace_s)) > 0:
                lane.arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await lane.arrived.wait()
                continue
            operation = lane.running = lane.take()
            lane.last_turn = self._runner.last_turn(operation.lane)
            async with self._runner.undisturbed(operation.lane):
                lane.note(operation, await self._run(operation, lane.lacking))
                await self._runner.look_after(operation)
            lane.running = None

    def _start_sample(self, operation: Operation, num_samples: int) -> None:
        task = asyncio.create_task(self._carry_out(operation), name=f"sample {operation.request_id}")
        self._samples[operation.request_id] = (operation, task)

        def ended(_: asyncio.Task[None]) -> None:
            del self._samples[operation.request_id]
            self._admission.leave_sample(operation.owner, num_samples, operation.size_bytes, operation.image_bytes)

        task.add_done_callback(ended)

    def _start_unload(self, operation: Operation) -> None:
        """An unload has no number: it follows all that its model has queued."""
        lane = self._lanes.get(operation.lane.removesuffix(UNLOAD_SUFFIX))

        async def unload() -> None:
            if lane is not None and lane.driver is not None:
                await asyncio.wait([lane.driver])
            await self._carry_out(operation)

        task = asyncio.create_task(unload(), name=f"unload {operation.lane}")
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _run(self, operation: Operation, missing: str) -> str | None:
        """Carry out an operation on a model; the category of its failure."""
        try:
            result = await self._result(operation, missing)
            logged = await self._runner.logs(operation, result.failure_category)
            return self._complete(operation, result, logged=logged).failure_category
        finally:
            self._admission.leave_queued(operation.owner, operation.size_bytes)

    async def _carry_out(self, operation: Operation) -> None:
        """An operation that belongs into no log."""
        self._complete(operation, await self._result(operation, ""))

    async def _result(self, operation: Operation, missing: str) -> Result:
        with self._tracing.running(operation):
            try:
                async with self._suspects.trial(operation):
                    return await self._tried(operation, missing)
            except (BackendFailed, Superseded) as error:  # of the trial
                return self._failed(operation, error)

    async def _tried(self, operation: Operation, missing: str) -> Result:
        deaths = lost = outages = 0
        while True:
            try:
                return await self._try(operation, missing)
            except ProcessDied as error:  # the operation's own doing, perhaps
                deaths += 1
                if deaths == MAX_DEATHS:
                    text = f"{error}, as it did when this {operation.operation_kind} ran before; all else goes on"
                    return self._failed(operation, BackendFailed(text))
            except ModelLost as error:  # before the operation began
                lost += 1
                if lost == MAX_RESTORATIONS:
                    return self._failed(operation, error)
            except DatabaseUnavailable as error:
                # Only before a model is changed, and in saves, which may be done twice.
                outages += 1
                if outages == MAX_OUTAGES or operation.seq_id == 0:
                    return self._failed(operation, error)
            except Exception as error:  # noqa: BLE001 - one operation's failure must not stop the lane
                if missing and isinstance(error, InvalidInput):
                    error = GradientIncomplete(f"{error} ({missing})")
                return self._failed(operation, error)
            log.warning("%s %d of %s runs again", operation.operation_kind, operation.seq_id, operation.lane)

    async def _try(self, operation: Operation, missing: str) -> Result:
        if operation.body is None:
            operation = replace(operation, body=await self._futures.rows.body(operation.request_id))
        if missing and operation.operation_kind == "optim_step":
            await self._runner.mark_incomplete(operation.lane)
        return await self._runner.run(operation)

    def _failed(self, operation: Operation, error: Exception) -> Result:
        log.info("%s %d of %s failed: %s", operation.operation_kind, operation.seq_id, operation.lane, error)
        return Result.of_error(error)

    def _fail(self, operation: Operation, error: Exception) -> None:
        self._suspects.forget(operation.request_id)
        self._complete(operation, self._failed(operation, error))

    def _complete(self, operation: Operation, result: Result, *, logged: bool = False) -> Result:
        stored = self._futures.queue.complete(operation.request_id, result, logged=logged)
        self._metrics.ended(operation.operation_kind, stored.failure_category)
        self._tracing.ended(operation.request_id, stored.failure_category)
        return stored
