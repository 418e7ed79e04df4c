"""Observers of operations: metrics, traces, steps, usage and recent samples. They subscribe in `app.py`.

No failure of an observer fails an operation.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tinker_server.api_schemas.base import Response
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.records import NO_SESSION, Step, UsageKind

log = logging.getLogger(__name__)
R = TypeVar("R")
OnResult = Callable[[str, Result], None]
"""Gets the request_id and the result of an operation."""


@dataclass
class Work(Generic[R]):
    """An operation that runs, and what its observers learn from its function."""

    operation: Operation
    request: R
    """The decoded request; None for a batch, which the ranks decode for themselves."""
    missing: str = ""
    """Says what the model's gradient lacks; empty: nothing."""
    base_model: str = ""
    session_id: str = NO_SESSION
    model_path: str | None = None
    """tinker:// path of the named weights of a sample."""
    directory: str | None = None
    """Directory of a sample's weights; None: the base model alone."""
    loaded_directory: str | None = None
    """Directory of the checkpoint that a load_weights read."""
    used: dict[UsageKind, int] = field(default_factory=dict)
    """Amounts that are counted for the owner."""
    response: Response | None = None
    waited_s: float = 0
    run_s: float = 0
    step: Step | None = None
    """A step for the run's curves, which is stored with the result."""


@dataclass(frozen=True)
class Observers:
    """Functions that are called as operations go on, in the order in which they subscribed."""

    accepted: list[Callable[[Operation], None]] = field(default_factory=list)
    """This server or an earlier server stored the operation, and it waits."""
    running: list[Callable[[Work[Any]], AbstractContextManager[None]]] = field(default_factory=list)
    """The context is open while the operation runs."""
    succeeded: list[Callable[[Work[Any]], Awaitable[None]]] = field(default_factory=list)
    """The operation has succeeded. Its result is stored after the call."""
    ended: list[OnResult] = field(default_factory=list)
    """The operation has its result, which is stored next."""
    stored: list[OnResult] = field(default_factory=list)
    """The result can be fetched."""


def notify(callbacks: Iterable[Callable[..., None]], *arguments: object) -> None:
    """Call observers of an event."""
    for callback in callbacks:
        try:
            callback(*arguments)
        except Exception:  # what is observed must go on
            log.exception("an observer of operations failed")
