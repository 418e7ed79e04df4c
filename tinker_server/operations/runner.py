"""Runs an operation to its result: again, a few times, where a server or a process died under it, or the database was
away. It knows nothing of the order of operations."""

import logging
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from tinker_server.backends.protocol import BackendFailed, InvalidInput, ProcessDied
from tinker_server.errors import GradientIncomplete
from tinker_server.models.crash_isolation import LeftOperations
from tinker_server.models.model import Model, NoModel
from tinker_server.models.retries import Retries
from tinker_server.offload import off_loop
from tinker_server.operations.table import OPERATIONS, decode
from tinker_server.store.futures.observers import Observers, Work
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.store import FutureStore
from tinker_server.weights.lookup import WeightStores

log = logging.getLogger(__name__)
TRAINED = ("forward_backward", "forward", "optim_step")
"""Operations that do nothing but have the trainer work: while the trainer did not work for them, they waited."""


class Runner:
    """Runs accepted operations."""

    def __init__(self, stores: WeightStores, futures: FutureStore, left: LeftOperations, observers: Observers) -> None:
        self._stores = stores
        self._futures = futures
        self._left = left
        self._observers = observers

    async def run(self, operation: Operation, model: Model | NoModel, missing: str) -> Result:
        """Run an operation on its model. `missing` says what the model's gradient lacks."""
        is_creation = isinstance(model, Model) and operation.seq_id == 0
        retries = Retries(outages=1) if is_creation else Retries()
        work: Work[Any] = Work(operation, operation.request, missing)
        try:
            async with AsyncExitStack() as stack:
                for watch in self._observers.running:
                    stack.enter_context(watch(work))
                if operation.tries is not None:
                    await stack.enter_async_context(self._left.attempt(operation))
                while True:
                    try:
                        return await self._attempt(work, model)
                    except Exception as error:
                        if not retries.allow(error):
                            raise
                        log.warning("retrying %s (attempt %d): %s", operation, retries.attempt, error)
        except Exception as error:  # noqa: BLE001 - one operation's failure must not stop its model's others
            if isinstance(error, ProcessDied):
                text = f"{error}, as it did when this {operation.operation_kind} ran before; all else goes on"
                error = BackendFailed(text)
            elif missing and isinstance(error, InvalidInput):
                error = GradientIncomplete(f"{error} ({missing})")
            return Result.of_failure(operation, error)

    async def _attempt(self, work: Work[Any], model: Model | NoModel) -> Result:
        """Raises InvalidInput, BackendFailed or a TinkerServerError; its text is for the user."""
        operation, kind = work.operation, OPERATIONS[work.operation.operation_kind]
        if operation.body is None:
            operation = replace(operation, body=await self._futures.rows.body(operation.request_id))
        if operation.request is None and not kind.decoded_elsewhere:
            operation = await off_loop(operation.owner, operation.size_bytes, decode, operation)
        work.operation, work.request = operation, operation.request
        queued_s, began_s = max(0.0, time.time() - operation.accepted_at), time.monotonic()
        worked_before_s = model.handle.worked_s
        try:
            work.response = response = await kind.run(self._stores, model, work)
        finally:
            if model.run is not None:
                work.base_model, work.session_id = model.run.base_model, model.run.session_id
        elapsed_s = time.monotonic() - began_s
        worked_s = model.handle.worked_s - worked_before_s
        is_work = operation.operation_kind in TRAINED and 0 < worked_s < elapsed_s
        work.run_s = worked_s if is_work else elapsed_s
        work.waited_s = queued_s + elapsed_s - work.run_s
        for observe in self._observers.succeeded:
            try:
                await observe(work)
            except Exception:  # records must not cost a result
                log.exception("%s is not recorded", operation)
        result = await off_loop(operation.owner, operation.size_bytes, kind.encode, response)
        return replace(result, step=work.step, loaded_directory=work.loaded_directory)
