"""When accepted operations run: each model's in the order of their numbers, samples at once."""

import asyncio
import contextlib
import logging
from typing import Protocol

from api_schemas.sampling import SampleRequest
from tinker_server.errors import Cancelled, LostModel, ShuttingDown, failure
from tinker_server.scheduling.admission import Admission
from tinker_server.scheduling.lanes import Lane
from tinker_server.store.futures import FutureStore
from tinker_server.store.operations import Operation
from tinker_server.store.results import Result

log = logging.getLogger(__name__)
UNLOAD_SUFFIX = ":unload"
"""A model's unloading is kept in a lane of its own, as number 0."""


class Runner(Protocol):
    """What carries operations out."""

    def decoded(self, operation: Operation) -> Operation:
        """The operation with its request at hand."""

    async def run(self, operation: Operation) -> Result:
        """Raises whatever the operation failed with."""


class Scheduler:
    """Owns every running operation."""

    def __init__(self, futures: FutureStore, runner: Runner, admission: Admission, gap_grace_s: float) -> None:
        self._futures = futures
        self._runner = runner
        self._admission = admission
        self._gap_grace_s = gap_grace_s
        self._lanes: dict[str, Lane] = {}
        self._samples: dict[str, tuple[Operation, asyncio.Task[None]]] = {}
        """By request_id, those that wait or run."""
        self._unloads: set[asyncio.Task[None]] = set()
        self._closing = False

    def resume(self, unfinished: list[Operation]) -> None:
        """Take up what an earlier server left: samples run again, training cannot, for its models are gone."""
        for operation in unfinished:
            if operation.operation_kind == "sample":
                again = self._runner.decoded(operation)
                assert isinstance(again.request, SampleRequest)
                self._admission.force(again.request.num_samples, len(again.body))
                self._start_sample(again, again.request.num_samples)
            else:
                lost = LostModel(
                    f"the server was restarted before this {operation.operation_kind} was done, and {operation.lane}"
                    " is no longer in memory; create the model again from a checkpoint"
                )
                self._fail(operation, lost)

    async def submit(self, operation: Operation) -> str:
        """Accept an operation, durably when this returns, and have it run; its request_id.

        Raises SequenceConflict, ShuttingDown, BadRequest, and Busy for a sample.
        """
        if self._closing:
            raise ShuttingDown("the server is stopping")
        if isinstance(operation.request, SampleRequest):
            return await self._submit_sample(operation, operation.request.num_samples)
        request_id = await self._futures.enqueue(operation)
        if request_id == operation.request_id and not self._closing:
            if operation.operation_kind == "unload_model":
                self._start_unload(operation)
            else:
                self._queue(operation)
        return request_id

    async def _submit_sample(self, operation: Operation, num_samples: int) -> str:
        self._admission.enter(num_samples, len(operation.body))
        request_id = ""
        try:
            request_id = await self._futures.enqueue(operation)
        finally:
            if request_id == operation.request_id and not self._closing:
                self._start_sample(operation, num_samples)
            else:
                self._admission.leave(num_samples, len(operation.body))
        return request_id

    def cancel(self, request_id: str, owner: str) -> bool:
        """Stop a sample of the owner's that waits or runs, whose result then says so; whether there was one."""
        operation, task = self._samples.get(request_id, (None, None))
        if operation is None or task is None or operation.owner != owner:
            return False
        self._fail(operation, Cancelled("the sample was cancelled by its client"))
        task.cancel()
        return True

    def is_idle(self, model_id: str, for_s: float) -> bool:
        """Whether a model has nothing that waits, runs or is not stored, and got nothing new for so long."""
        lane = self._lanes.get(model_id)
        if lane is None:
            return True
        if lane.is_busy or self._futures.has_unstored(model_id):
            return False
        return lane.last_arrival_s + for_s <= asyncio.get_running_loop().time()

    def forget(self, model_id: str) -> None:
        """A model is gone for good: drop what is kept of its numbers, unless something has just arrived."""
        if self.is_idle(model_id, 0):
            self._lanes.pop(model_id, None)

    def refuse_number(self, model_id: str, seq_id: int) -> None:
        """Note that an operation was refused before it had a future, so that none waits for it."""
        if (lane := self._lanes.get(model_id)) is not None:
            lane.refuse(seq_id)

    async def drain(self, timeout_s: float) -> None:
        """Start nothing more; let what runs end, and stop it after `timeout_s`. The rest stays queued."""
        self._closing = True
        for lane in self._lanes.values():
            lane.arrived.set()
        drivers = {lane.driver for lane in self._lanes.values() if lane.driver is not None}
        samples = {task for _, task in self._samples.values()}
        running = {task for task in drivers | samples | self._unloads if not task.done()}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _queue(self, operation: Operation) -> None:
        lane = self._lanes.get(operation.lane)
        if lane is None:
            # A lane starts with the model's creation, number 0; without it the model is not in memory.
            lane = self._lanes[operation.lane] = Lane(expected=operation.seq_id)
        lane.add(operation, asyncio.get_running_loop().time())
        if lane.driver is None or lane.driver.done():
            lane.driver = asyncio.create_task(self._drive(lane), name=f"lane {operation.lane}")

    async def _drive(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        while lane.waiting and not self._closing:
            wait_s = lane.last_arrival_s + self._gap_grace_s - loop.time()
            if lane.has_gap() and wait_s > 0:
                lane.arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await lane.arrived.wait()
                continue
            await self._run(lane.take())

    def _start_sample(self, operation: Operation, num_samples: int) -> None:
        task = asyncio.create_task(self._run(operation), name=f"sample {operation.request_id}")
        self._samples[operation.request_id] = (operation, task)

        def ended(_: asyncio.Task[None]) -> None:
            del self._samples[operation.request_id]
            self._admission.leave(num_samples, len(operation.body))

        task.add_done_callback(ended)

    def _start_unload(self, operation: Operation) -> None:
        """An unload has no number: it follows all that its model has queued."""
        lane = self._lanes.get(operation.lane.removesuffix(UNLOAD_SUFFIX))

        async def unload() -> None:
            if lane is not None and lane.driver is not None:
                await asyncio.wait([lane.driver])
            await self._run(operation)

        task = asyncio.create_task(unload(), name=f"unload {operation.lane}")
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _run(self, operation: Operation) -> None:
        try:
            result = await self._runner.run(operation)
        except Exception as error:  # one operation's failure must not stop the lane
            self._fail(operation, error)
        else:
            self._futures.complete(operation.request_id, result)

    def _fail(self, operation: Operation, error: Exception) -> None:
        body = failure(error).model_dump_json().encode()
        log.info("%s %d of %s failed: %s", operation.operation_kind, operation.seq_id, operation.lane, error)
        self._futures.complete(operation.request_id, Result(body, "application/json", failed=True))
