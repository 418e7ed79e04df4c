"""A task per model, which does all that is done to the model, step by step.

Operations run in the order of their numbers. Other requests (suspend, restore, drop) run before the next operation, and
an unload behind all operations that wait. This order is the only exclusion: a model has no lock. The task lives while
there is something to do.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

from tinker_server.errors import BadRequest, Busy
from tinker_server.models.intake import Intake
from tinker_server.models.lane import Lane, lane_after
from tinker_server.models.model import Model
from tinker_server.offload import INLINE_BYTES
from tinker_server.store.futures.records import Operation, PastOperation

Request = Callable[[], Awaitable[None]]
"""A method of the model."""


class Actor:
    """The inbox of a model, and the task that empties it."""

    def __init__(self, model: Model, intake: Intake) -> None:
        self.model = model
        self.lane: Lane | None = None
        """None until an operation has come, and the model's past operations were read for its number."""
        self._intake = intake
        self._queue = intake.futures.queue
        self._budget = intake.admission.queued
        self._num_arriving = 0
        """Operations that are being accepted."""
        self._requests: deque[tuple[Request, asyncio.Future[None]]] = deque()
        self._unloads: deque[Operation] = deque()
        self._running: Operation | None = None
        self._latest_work = 0
        """`LoadedModel.latest_work` at the start of the running operation."""
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.was_cut_off = False
        """True if the server's stop interrupted an operation."""

    @property
    def is_working(self) -> bool:
        """True while its task runs."""
        return self._task is not None and not self._task.done()

    @property
    def is_settled(self) -> bool:
        """True where nothing is under way, and the model is as its last result says; the rest waits or is to come."""
        return not self.is_working and not self.was_cut_off

    def is_idle(self, for_s: float) -> bool:
        """Return whether nothing arrives, waits or runs, and nothing has come for so long."""
        if self.is_working or self._num_arriving:
            return False
        return self.lane is None or self.lane.last_arrival_s + for_s <= asyncio.get_running_loop().time()

    def in_flight(self) -> Iterator[tuple[Operation, bool]]:
        """Yield the operations that run or wait, each with whether it runs."""
        if self._running is not None:
            yield self._running, True
        if self.lane is not None:
            for operation in self.lane.waiting.values():
                yield operation, False

    async def accept(self, operation: Operation) -> str:
        """Accept an operation, durably when this returns, have it run, and return its request_id.

        Raises SequenceConflict, ShuttingDown, BadRequest, Busy.
        """
        self._num_arriving += 1
        try:
            await self._intake.admit(operation)
            if operation.operation_kind == "unload_model":
                accepted = await self._queue.enqueue(operation)
                if accepted.is_new and not self._is_closing:
                    self._queue_unload(replace(operation, request_id=accepted.request_id))
                return accepted.request_id
            lane = self.lane or await self._read_lane(operation.seq_id)
            if not lane.takes(operation.operation_kind, operation.seq_id):
                return await self._accept_late(operation)
            return await self._accept_in_order(lane, operation)
        except Busy:
            lane = self.lane or await self._read_lane(operation.seq_id)
            lane.put_off(operation.seq_id, asyncio.get_running_loop().time())
            raise
        finally:
            self._num_arriving -= 1

    async def _accept_in_order(self, lane: Lane, operation: Operation) -> str:
        """Accept an operation that no later operation has overtaken. Beyond its owner's bounds it is accepted only if
        the lane waits for it. Raises as `accept`."""
        number, counts = operation.seq_id, (operation.owner, 1, operation.size_bytes)
        try:
            self._budget.enter(*counts)
        except Busy:
            if not lane.lets_in(number):
                raise
            self._budget.enter(*counts, forced=True)
        accepted = None
        lane.arriving[number] += 1
        try:
            accepted = await self._queue.enqueue(operation)
        finally:
            lane.arriving[number] -= 1
            if not lane.arriving[number]:
                del lane.arriving[number]
            self._woken.set()
            if accepted is None or not accepted.is_new or self._is_closing:
                self._budget.leave(*counts)
                if number not in lane.waiting:
                    lane.let_in.discard(number)
        if accepted.is_new and not self._is_closing:
            self._queue_in(lane, replace(operation, request_id=accepted.request_id))
        return accepted.request_id

    async def _accept_late(self, operation: Operation) -> str:
        """Accept a repeat of what was accepted before. Raises BadRequest for what comes now for the first time."""
        late = _too_late(operation)
        if not await self._intake.futures.rows.knows(operation.lane, operation.seq_id):
            raise late
        accepted = await self._queue.enqueue(operation)
        if accepted.is_new:  # stored by a commit that had seemed to fail
            self._intake.fail(replace(operation, request_id=accepted.request_id), late)
        return accepted.request_id

    async def resume(self, operation: Operation) -> None:
        """Run an operation that an earlier server left, unless later ones have run: that server did not know of it, for
        its commit had seemed to fail."""
        if operation.operation_kind == "unload_model":
            self._queue_unload(operation)
            return
        lane = self.lane or await self._read_lane(operation.seq_id)
        if not lane.takes(operation.operation_kind, operation.seq_id):
            self._intake.fail(operation, _too_late(operation))
            return
        self._budget.enter(operation.owner, 1, operation.size_bytes, forced=True)
        self._queue_in(lane, operation)

    async def _read_lane(self, first: int) -> Lane:
        """Return the lane that begins where the model's stored operations end: with `first` if there are none."""
        lane = await lane_after(self._past(), first)
        self.lane = self.lane or lane
        return self.lane

    async def _past(self) -> AsyncIterator[PastOperation]:
        before = None
        while page := await self._intake.futures.rows.past(self.model.id, before):
            for operation in page:
                yield operation
            before = page[-1].seq_id

    def _queue_in(self, lane: Lane, operation: Operation) -> None:
        """Run an operation after all before it."""
        if operation.size_bytes > INLINE_BYTES and (lane.waiting or self.is_working):
            operation = replace(operation, body=None, request=None)  # it is in the database
        lane.add(operation, asyncio.get_running_loop().time())
        self._wake()

    def _queue_unload(self, operation: Operation) -> None:
        """Have an unload_model run, which has no number, once no operation waits."""
        self._unloads.append(operation)
        self._wake()

    async def ask(self, request: Request) -> None:
        """Have a request run before the next operation, wait for it, and raise what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append((request, done))
        self._wake()
        await done

    def cancel_waiting(self, error: Exception) -> int:
        """Fail the operations that wait, and return their number. A running operation goes on."""
        if self.lane is None:
            return 0
        cancelled = self.lane.take_all()
        for operation in cancelled:
            self._intake.fail(operation, error)
            self._budget.leave(operation.owner, 1, operation.size_bytes)
            self.lane.note(operation, "user")
        self._woken.set()
        return len(cancelled)

    def refuse(self, number: int, operation_kind: str) -> None:
        """Note that an operation was refused before it had a future, so that none waits for it."""
        if self.lane is not None:
            self.lane.refuse(number, operation_kind)
            self._woken.set()

    def stop(self) -> asyncio.Task[None] | None:
        """Begin no more operations, and end what has changed nothing. Returns the task while it runs."""
        self._is_closing = True
        self._woken.set()
        if self._task is None or self._task.done():
            return None
        waits = self._running is not None and self.model.handle.latest_work == self._latest_work
        if waits or (self._running is None and self.model.is_being_restored):
            self._task.cancel()
        return self._task

    def _wake(self) -> None:
        self._woken.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name=f"actor of {self.model.id}")

    async def _work(self) -> None:
        while True:
            if self._requests:
                await _answer(*self._requests.popleft())
            elif self._is_closing:
                return
            elif self.lane is not None and self.lane.waiting:
                wait_s = self.lane.wait_s(asyncio.get_running_loop().time(), self._intake.gap_grace_s)
                if wait_s > 0:
                    self._woken.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._woken.wait()
                else:
                    await self._operate(self.lane)
            elif self._unloads:
                operation = self._unloads.popleft()
                result = await self._intake.run(operation, self.model, "")
                self._queue.complete(operation.request_id, result)
            else:
                return

    async def _operate(self, lane: Lane) -> None:
        operation = self._running = lane.take()
        self._latest_work = self.model.handle.latest_work
        try:
            result = await self._intake.run(operation, self.model, lane.lacking)
            logged = await self.model.takes_place_in_log(operation, result.failure_category)
            result = self._queue.complete(operation.request_id, result, logged=logged)
        finally:
            self._budget.leave(operation.owner, 1, operation.size_bytes)
        lane.note(operation, result.failure_category)
        await self.model.maybe_snapshot(operation.operation_kind)
        self._running = None


def _too_late(operation: Operation) -> BadRequest:
    return BadRequest(
        f"{operation} comes too late: operations after it have run, and only a part of a batch whose optim_step was"
        " not taken is let in then"
    )


async def _answer(request: Request, done: asyncio.Future[None]) -> None:
    if done.cancelled():
        return
    try:
        await request()
    except asyncio.CancelledError:
        done.cancel()
        raise
    except Exception as error:  # noqa: BLE001 - the one who asked gets it
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(None)
