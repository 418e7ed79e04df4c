"""What a child process did for a call, and when: told to whoever listens where the call was made.

Knows nothing of tracing. Where nobody listens, nothing is kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

ANSWERED, UNANSWERED = "value", "unanswered"
"""What became of a call; any other word is how the process names what it raised."""


@dataclass(frozen=True)
class ProcessSpan:
    """One command in one process."""

    process: str
    """`trainer NAME rank 0`, `sampler NAME`."""
    command: str
    """`OptimStep`, `Sample`."""
    began_ns: int
    """In Unix nanoseconds, by the process's clock; of what was not answered, when it was asked."""
    ended_ns: int
    outcome: str
    """`value`, `invalid`, `lost`, `failed`, `broke`, or `unanswered`: cancelled, or the process ended under it."""


Listener = Callable[[ProcessSpan], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def current_listener() -> Listener | None:
    """Who listens here."""
    return _listener.get()


def tell(span: ProcessSpan) -> None:
    """A call has ended."""
    if (listener := _listener.get()) is not None:
        listener(span)


@contextlib.contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Calls that are made in the block, and by tasks that it starts, are told to this one, which must not raise."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
