"""Carries one operation out to a result, which it hands to the store.

An operation runs again, a few times, where a server or a process died under it, or the database was away.
"""

import logging
from collections import Counter
from dataclasses import replace
from typing import Protocol

from backends.protocol import BackendFailed, InvalidInput, ModelLost, ProcessDied
from tinker_server.errors import DatabaseUnavailable, GradientIncomplete, Superseded, shortened
from tinker_server.models.crash_isolation import LeftOperations
from tinker_server.models.model import Model
from tinker_server.observability.metrics import Metrics
from tinker_server.observability.tracing.hooks import Tracing
from tinker_server.store.futures.records import Accepted, Operation, Result
from tinker_server.store.futures.store import FutureStore

log = logging.getLogger(__name__)
MAX_INTERRUPTIONS: dict[type[Exception], int] = {ProcessDied: 2, ModelLost: 5, DatabaseUnavailable: 4}
"""Interruptions of each kind after which an operation fails alone: a process died under it; its model was not restored
before it began; the database did not answer for half a minute, which interrupts no change of a model."""


class Runner(Protocol):
    """Carries out each kind of operation; `operations/table.py` has the one there is."""

    def decoded(self, operation: Operation) -> Operation:
        """Return the operation with its decoded request."""

    async def run(self, operation: Operation, model: Model | None) -> Result:
        """Do it, on its model unless it is a sample. Raises whatever it fails with."""


class Execution:
    """Runs accepted operations, and knows nothing of their order."""

    def __init__(self, futures: FutureStore, runner: Runner, metrics: Metrics, tracing: Tracing) -> None:
        self._futures = futures
        self._runner = runner
        self._metrics = metrics
        self._tracing = tracing
        self._left = LeftOperations(futures)

    def adopt(self, unfinished: list[Operation]) -> None:
        """Accept again what an earlier server left."""
        self._left.isolate(unfinished)
        for operation in unfinished:
            self._tracing.accepted(operation, operation.request_id)

    async def accept(self, operation: Operation) -> Accepted:
        """Store an operation, durably when this returns. Raises SequenceConflict, BadRequest, DatabaseUnavailable."""
        accepted = await self._futures.queue.enqueue(operation)
        if accepted.is_new:
            self._metrics.accepted(operation.operation_kind)
            self._tracing.accepted(operation, accepted.request_id)
        return accepted

    async def with_request(self, operation: Operation) -> Operation:
        """Return the operation with its body read and its request decoded."""
        body = await self._futures.rows.body(operation.request_id)
        return self._runner.decoded(replace(operation, body=body))

    async def result(self, operation: Operation, model: Model | None = None, missing: str = "") -> Result:
        """Run an operation, again where something died under it. `missing` says what its model's gradient lacks."""
        with self._tracing.running(operation):
            if operation.tries is None:
                return await self._retried(operation, model, missing)
            try:
                async with self._left.attempt(operation):
                    return await self._retried(operation, model, missing)
            except (BackendFailed, Superseded) as error:  # of the trial
                return _failed(operation, error)

    async def _retried(self, operation: Operation, model: Model | None, missing: str) -> Result:
        interruptions = Counter[type[Exception]]()
        while True:
            try:
                if operation.body is None:
                    operation = replace(operation, body=await self._futures.rows.body(operation.request_id))
                if missing and model is not None and operation.operation_kind == "optim_step":
                    await model.mark_incomplete()
                return await self._runner.run(operation, model)
            except tuple(MAX_INTERRUPTIONS) as error:
                kind = next(kind for kind in MAX_INTERRUPTIONS if isinstance(error, kind))
                interruptions[kind] += 1
                is_creation = model is not None and operation.seq_id == 0
                if interruptions[kind] == MAX_INTERRUPTIONS[kind] or (kind is DatabaseUnavailable and is_creation):
                    return _failed(operation, _blaming(operation, error))
                name = (operation.operation_kind, operation.seq_id, operation.lane)
                log.warning("retrying %s %d of %s (attempt %d): %s", *name, interruptions.total() + 1, error)
            except Exception as error:  # noqa: BLE001 - one operation's failure must not stop its model's others
                if missing and isinstance(error, InvalidInput):
                    error = GradientIncomplete(f"{error} ({missing})")
                return _failed(operation, error)

    def fail(self, operation: Operation, error: Exception) -> None:
        """End an operation that is not run."""
        self._left.release(operation.request_id)
        self.complete(operation, _failed(operation, error))

    def complete(self, operation: Operation, result: Result, *, logged: bool = False) -> Result:
        """Have a result stored, and return the one that will be. `logged`: it takes the next place in its model's
        log."""
        stored = self._futures.queue.complete(operation.request_id, result, logged=logged)
        self._metrics.ended(operation.operation_kind, stored.failure_category)
        self._tracing.ended(operation.request_id, stored.failure_category)
        return stored


def _blaming(operation: Operation, error: Exception) -> Exception:
    if not isinstance(error, ProcessDied):
        return error
    return BackendFailed(f"{error}, as it did when this {operation.operation_kind} ran before; all else goes on")


def _failed(operation: Operation, error: Exception) -> Result:
    said = shortened(str(error))
    log.info("%s %d of %s failed: %s", operation.operation_kind, operation.seq_id, operation.lane, said)
    return Result.of_error(error)
