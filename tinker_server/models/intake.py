"""What all models and samples share to accept and run operations."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinker_server.errors import Busy, ShuttingDown
from tinker_server.models.admission import Admission
from tinker_server.models.crash_isolation import LeftOperations
from tinker_server.models.model import Model, NoModel
from tinker_server.store.disk_account import DiskAccount
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.store import FutureStore

STOPPING = "the server is stopping"
"""The text of `ShuttingDown`."""


@dataclass
class Intake:
    """The bounds of owners, and the functions that run an operation."""

    futures: FutureStore
    run: Callable[[Operation, Model | NoModel, str], Awaitable[Result]]
    """Runs an operation to its result, on its model unless it is a sample. The text says what the gradient lacks."""
    decode: Callable[[Operation], Operation]
    """Returns the operation with its decoded request."""
    left: LeftOperations
    admission: Admission
    disk: DiskAccount
    gap_grace_s: float
    """Seconds for which a missing number of a lane is waited for."""
    is_closing: bool = False
    """True once the server stops: nothing more is accepted or begun."""

    async def admit(self, operation: Operation) -> None:
        """Raise ShuttingDown, or Busy for new work of an owner that has no room on the disk. A repeat takes no room,
        and an unload makes some."""
        if self.is_closing:
            raise ShuttingDown(STOPPING)
        if operation.operation_kind == "unload_model":
            return
        try:
            await self.disk.require_room(operation.owner, operation.size_bytes + operation.answer_bytes)
        except Busy:
            if not await self.futures.rows.knows(operation.lane, operation.seq_id):
                raise

    def fail(self, operation: Operation, error: Exception) -> None:
        """End an operation that is not run."""
        self.futures.queue.complete(operation.request_id, Result.of_failure(operation, error))
