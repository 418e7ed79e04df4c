"""Samples that run. Each is a task that starts at once, because samples have no order."""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import replace

from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.errors import Cancelled
from tinker_server.models.intake import Intake
from tinker_server.models.model import NO_MODEL
from tinker_server.store.futures.records import Operation


class Samples:
    """The samples of all owners."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._running: dict[str, tuple[Operation, asyncio.Task[None]]] = {}
        """By request_id."""

    async def accept(self, operation: Operation) -> str:
        """Accept a sample, durably when this returns, have it run, and return its request_id.

        Raises SequenceConflict, ShuttingDown, BadRequest, Busy.
        """
        intake = self._intake
        await intake.admit(operation)
        counts = _counts(operation)
        intake.admission.samples.enter(*counts)
        accepted = None
        try:
            accepted = await intake.futures.queue.enqueue(operation)
        finally:
            if accepted is not None and accepted.is_new and not intake.is_closing:
                self._start(replace(operation, request_id=accepted.request_id))
            else:
                intake.admission.samples.leave(*counts)
        return accepted.request_id

    async def resume(self, operation: Operation) -> None:
        """Run a sample that an earlier server left. That server let its images in, and here they count for nothing."""
        try:
            body = await self._intake.futures.rows.body(operation.request_id)
            operation = self._intake.decode(replace(operation, body=body))
        except Exception as error:  # noqa: BLE001 - one that cannot be read any more must not stop the server
            self._intake.fail(operation, error)
            return
        self._intake.admission.samples.enter(*_counts(operation), forced=True)
        self._start(operation)

    def cancel(self, request_id: str, owner: str) -> bool:
        """Stop a sample of the owner's, whose result then says so. Return whether it was running."""
        operation, _ = self._running.get(request_id, (None, None))
        if operation is None or operation.owner != owner:
            return False
        self._cancel(request_id, Cancelled("the sample was cancelled by its client"))
        return True

    def cancel_all(self, lanes: Collection[str], error: Exception) -> int:
        """Stop the samples of these sampling sessions, and return their number."""
        request_ids = [request_id for request_id, (operation, _) in self._running.items() if operation.lane in lanes]
        for request_id in request_ids:
            self._cancel(request_id, error)
        return len(request_ids)

    def running(self) -> Iterator[tuple[Operation, asyncio.Task[None]]]:
        """Yield the samples, each with its task."""
        yield from self._running.values()

    def _cancel(self, request_id: str, error: Exception) -> None:
        operation, task = self._running[request_id]
        self._intake.fail(operation, error)
        task.cancel()

    def _start(self, operation: Operation) -> None:
        task = asyncio.create_task(self._run(operation), name=f"sample {operation.request_id}")
        self._running[operation.request_id] = (operation, task)

        def end(_: asyncio.Task[None]) -> None:
            del self._running[operation.request_id]
            self._intake.admission.samples.leave(*_counts(operation))

        task.add_done_callback(end)

    async def _run(self, operation: Operation) -> None:
        result = await self._intake.run(operation, NO_MODEL, "")
        self._intake.futures.queue.complete(operation.request_id, result)


def _counts(operation: Operation) -> tuple[str, int, int, int]:
    assert isinstance(operation.request, SampleRequest)
    return operation.owner, operation.request.num_samples, operation.size_bytes, operation.image_bytes
