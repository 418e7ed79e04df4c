"""When accepted work runs: each model's operations in the order of their numbers, samples at once.

Numbers come in any order and some never come: the SDK may send the first part of a batch last, and what
it could not send, or was refused, keeps its number. A missing number is settled, that is no longer
waited for, when a later operation other than forward_backward arrives (the SDK sends those only after
all before them were answered), when the server itself refused it, or when a grace has passed.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Protocol

from api_schemas.base import Request
from api_schemas.sampling import SampleRequest
from tinker_server.errors import Cancelled, LostModel, ShuttingDown, failure
from tinker_server.scheduling.admission import Admission
from tinker_server.store.futures import FutureStore, Work
from tinker_server.store.results import Result

log = logging.getLogger(__name__)
UNLOAD_SUFFIX = ":unload"
"""A model's unloading is kept in a lane of its own, as number 0."""


class Operations(Protocol):
    """What does the work."""

    async def run(self, work: Work, request: Request) -> Result:
        """Raises whatever the operation failed with."""

    def replay(self, work: Work) -> Request | None:
        """The request of work that an earlier server accepted; None where it cannot be done any more."""


@dataclass
class Lane:
    """A model's operations that wait."""

    expected: int
    """Smallest number that has neither run nor been settled."""
    settled_below: int = 0
    refused: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[Work, Request]] = field(default_factory=dict)
    last_arrival: float = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    driver: asyncio.Task[None] | None = None

    def has_gap_before(self, number: int) -> bool:
        """Whether an earlier number may still be on its way."""
        while self.expected in self.refused:
            self.refused.discard(self.expected)
            self.expected += 1
        return number > self.expected and number > self.settled_below


class Scheduler:
    """Owns every running operation."""

    def __init__(self, futures: FutureStore, operations: Operations, admission: Admission, gap_grace_s: float) -> None:
        self._futures = futures
        self._operations = operations
        self._admission = admission
        self._gap_grace_s = gap_grace_s
        self._lanes: dict[str, Lane] = {}
        self._samples: dict[str, tuple[Work, asyncio.Task[None]]] = {}
        """By request_id, those that wait or run."""
        self._unloads: set[asyncio.Task[None]] = set()
        self._closing = False

    async def resume(self, left: list[Work]) -> None:
        """Take up what an earlier server left: samples run again, training cannot, for its models are gone."""
        for work in left:
            request = self._operations.replay(work)
            if isinstance(request, SampleRequest):
                self._admission.force(request.num_samples, len(work.body))
                self._start_sample(work, request)
            else:
                lost = LostModel(
                    f"the server was restarted before this {work.kind} was done, and {work.lane} is no longer in "
                    "memory; create the model again from a checkpoint"
                )
                self._finish(work, lost)

    async def submit(self, work: Work, request: Request) -> str:
        """Accept an operation, durably when this returns, and have it run; its request_id.

        Raises SequenceConflict, ShuttingDown, BadRequest, and Busy for a sample.
        """
        if self._closing:
            raise ShuttingDown("the server is stopping")
        if isinstance(request, SampleRequest):
            return await self._submit_sample(work, request)
        request_id = await self._futures.enqueue(work)
        if request_id == work.request_id and not self._closing:
            if work.kind == "unload_model":
                self._start_unload(work, request)
            else:
                self._queue(work, request)
        return request_id

    async def _submit_sample(self, work: Work, request: SampleRequest) -> str:
        self._admission.enter(request.num_samples, len(work.body))
        request_id = ""
        try:
            request_id = await self._futures.enqueue(work)
        finally:
            if request_id == work.request_id and not self._closing:
                self._start_sample(work, request)
            else:
                self._admission.leave(request.num_samples, len(work.body))
        return request_id

    def cancel(self, request_id: str, owner: str) -> bool:
        """Stop a sample of the owner's that waits or runs, whose result then says so; whether there was one."""
        work, task = self._samples.get(request_id, (None, None))
        if work is None or task is None or work.owner != owner:
            return False
        self._finish(work, Cancelled("the sample was cancelled by its client"))
        task.cancel()
        return True

    def is_idle(self, model_id: str, for_s: float) -> bool:
        """Whether a model has nothing that waits or runs, and got nothing new for so long."""
        lane = self._lanes.get(model_id)
        if lane is None:
            return True
        busy = bool(lane.waiting) or (lane.driver is not None and not lane.driver.done())
        return not busy and lane.last_arrival + for_s <= asyncio.get_running_loop().time()

    def forget(self, model_id: str) -> None:
        """A model is gone for good: drop what is kept of its numbers, unless something has just arrived."""
        if self.is_idle(model_id, 0):
            self._lanes.pop(model_id, None)

    def refuse_number(self, model_id: str, seq_id: int) -> None:
        """Note that an operation was refused before it had a future, so that none waits for it."""
        lane = self._lanes.get(model_id)
        if lane is not None and seq_id >= lane.expected:
            lane.refused.add(seq_id)
            lane.arrived.set()

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

    def _queue(self, work: Work, request: Request) -> None:
        lane = self._lanes.get(work.lane)
        if lane is None:
            # A lane starts with the model's creation, number 0; without it the model is not in memory.
            lane = self._lanes[work.lane] = Lane(expected=work.seq_id)
        lane.waiting[work.seq_id] = (work, request)
        lane.last_arrival = asyncio.get_running_loop().time()
        if work.kind != "forward_backward":
            lane.settled_below = max(lane.settled_below, work.seq_id)
        lane.arrived.set()
        if lane.driver is None or lane.driver.done():
            lane.driver = asyncio.create_task(self._drive(lane), name=f"lane {work.lane}")

    async def _drive(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        while lane.waiting and not self._closing:
            number = min(lane.waiting)
            left_s = lane.last_arrival + self._gap_grace_s - loop.time()
            if lane.has_gap_before(number) and left_s > 0:
                lane.arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await lane.arrived.wait()
                continue
            work, request = lane.waiting.pop(number)
            lane.expected = max(lane.expected, number + 1)
            await self._run(work, request)

    def _start_sample(self, work: Work, request: SampleRequest) -> None:
        task = asyncio.create_task(self._run(work, request), name=f"sample {work.request_id}")
        self._samples[work.request_id] = (work, task)

        def ended(_: asyncio.Task[None]) -> None:
            del self._samples[work.request_id]
            self._admission.leave(request.num_samples, len(work.body))

        task.add_done_callback(ended)

    def _start_unload(self, work: Work, request: Request) -> None:
        """An unload has no number: it follows all that its model has queued."""
        lane = self._lanes.get(work.lane.removesuffix(UNLOAD_SUFFIX))

        async def unload() -> None:
            if lane is not None and lane.driver is not None:
                await asyncio.wait([lane.driver])
            await self._run(work, request)

        task = asyncio.create_task(unload(), name=f"unload {work.lane}")
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _run(self, work: Work, request: Request) -> None:
        try:
            result = await self._operations.run(work, request)
        except Exception as error:  # one operation's failure must not stop the lane
            self._finish(work, error)
        else:
            self._futures.complete(work.request_id, result)

    def _finish(self, work: Work, error: Exception) -> None:
        body = failure(error).model_dump_json().encode()
        log.info("%s %d of %s failed: %s", work.kind, work.seq_id, work.lane, error)
        self._futures.complete(work.request_id, Result(body, "application/json", failed=True))
