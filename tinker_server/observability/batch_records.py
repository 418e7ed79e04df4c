"""Keeps a few datums of each step: decodes batches again, after their results, without delaying them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from tinker_server.api_schemas.losses import LOSS_CONFIG
from tinker_server.api_schemas.training import ForwardBackwardOutput
from tinker_server.observability.kept_datums import BatchName, KeptBatch, keep
from tinker_server.offload import off_loop
from tinker_server.operations.recording import decode_batch
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation

log = logging.getLogger(__name__)
LARGEST_BODY_BYTES = 32 << 20
"""Larger bodies are not decoded again, nor an owner's bodies beyond this at a time: each that waits is in memory."""


class BatchRecords:
    """Observes forward_backward. While a run's batch is read, its next ones are not kept."""

    def __init__(self, put: Callable[[KeptBatch], None], *, is_wanted: bool) -> None:
        """`put` is called with each batch."""
        self._put = put
        self._is_wanted = is_wanted
        self._reading: dict[str, asyncio.Task[None]] = {}
        """By run."""
        self._reading_bytes: Counter[str] = Counter()
        """Bytes of the bodies by owner."""

    async def on_success(self, work: Work[Any]) -> None:
        """Read a batch in a task of its own. Its step has been recorded."""
        operation, output = work.operation, work.response
        if operation.operation_kind != "forward_backward" or not isinstance(output, ForwardBackwardOutput):
            return
        size_bytes = self._reading_bytes[operation.owner] + operation.size_bytes
        is_read = self._is_wanted and size_bytes <= LARGEST_BODY_BYTES
        if is_read and work.step is not None and operation.lane not in self._reading:
            name = BatchName(operation.owner, operation.lane, work.step.step, work.base_model)
            task = asyncio.create_task(self._read(operation, name, output), name="keeping datums of a step")
            self._reading[operation.lane] = task
            self._reading_bytes[operation.owner] = size_bytes
            task.add_done_callback(lambda _: self._end(operation))

    def forget(self, run_id: str) -> None:
        """Keep nothing more of a run that is deleted."""
        if run_id in self._reading:
            self._reading[run_id].cancel()

    async def stop(self) -> None:
        """End all reading."""
        for task in list(self._reading.values()):
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)

    def _end(self, operation: Operation) -> None:
        del self._reading[operation.lane]
        self._reading_bytes[operation.owner] -= operation.size_bytes

    async def _read(self, operation: Operation, name: BatchName, output: ForwardBackwardOutput) -> None:
        try:
            batch = await off_loop(name.owner, operation.size_bytes, _keep, operation, name, output)
            if batch is not None:
                self._put(batch)
        except Exception:  # records must not cost anything else
            log.exception("the datums of %s are not kept", operation)


def _keep(operation: Operation, name: BatchName, output: ForwardBackwardOutput) -> KeptBatch | None:
    sent = decode_batch(operation)
    return keep(name, sent, output) if sent.loss_fn in LOSS_CONFIG else None
