"""What all models and samples share to accept and run operations."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinker_server.models.admission import Admission
from tinker_server.models.crash_isolation import LeftOperations
from tinker_server.models.model import Model
from tinker_server.store.disk_account import DiskAccount
from tinker_server.store.futures.records import Operation, Result


@dataclass(frozen=True)
class Intake:
    """The bounds of owners, and the functions that run an operation."""

    run: Callable[[Operation, Model | None, str], Awaitable[Result]]
    """Runs an operation to its result, on its model unless it is a sample. The text says what the gradient lacks."""
    decode: Callable[[Operation], Operation]
    """Returns the operation with its decoded request."""
    left: LeftOperations
    admission: Admission
    disk: DiskAccount
    gap_grace_s: float
    """Seconds for which a missing number of a lane is waited for."""
