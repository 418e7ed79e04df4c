"""Carries one operation out to a result, which it hands to the store.

An operation runs again, a few times, where a server or a process died under it, or the database was away.
"""

import logging
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
MAX_OUTAGES = 4
"""Times that the database gave an operation no answer, each after the half minute for which one is waited."""
MAX_DEATHS, MAX_RESTORATIONS = 2, 5
"""An operation under which the trainer died so often fails alone; so does one whose model so often was not restored."""


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
            try:
                async with self._left.attempt(operation):
                    return await self._retried(operation, model, missing)
            except (BackendFailed, Superseded) as error:  # of the trial
                return _failed(operation, error)

    async def _retried(self, operation: Operation, model: Model | None, missing: str) -> Result:
        deaths = lost = outages = 0
        while True:
            try:
                if operation.body is None:
                    operation = replace(operation, body=await self._futures.rows.body(operation.request_id))
                if missing and model is not None and operation.operation_kind == "optim_step":
                    await model.mark_incomplete()
                return await self._runner.run(operation, model)
            except ProcessDied as error:  # the operation's own doing, perhaps
                deaths += 1
                if deaths == MAX_DEATHS:
                    text = f"{error}, as it did when this {operation.operation_kind} ran before; all else goes on"
                    return _failed(operation, BackendFailed(text))
            except ModelLost as error:  # before the operation began
                lost += 1
                if lost == MAX_RESTORATIONS:
                    return _failed(operation, error)
            except DatabaseUnavailable as error:
                # Only before a model is changed, and in saves, which may be done twice.
                outages += 1
                if outages == MAX_OUTAGES or (model is not None and operation.seq_id == 0):
                    return _failed(operation, error)
            except Exception as error:  # noqa: BLE001 - one operation's failure must not stop its model's others
                if missing and isinstance(error, InvalidInput):
                    error = GradientIncomplete(f"{error} ({missing})")
                return _failed(operation, error)
            log.warning("%s %d of %s runs again", operation.operation_kind, operation.seq_id, operation.lane)

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


def _failed(operation: Operation, error: Exception) -> Result:
    said = shortened(str(error))
    log.info("%s %d of %s failed: %s", operation.operation_kind, operation.seq_id, operation.lane, said)
    return Result.of_error(error)
