"""Spans of the commands that child processes ran, passed to the callback that is set where the call was made.

Knows nothing of tracing. Without a callback, nothing is kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

ANSWERED, UNANSWERED = "value", "unanswered"
"""Outcomes of a call; any other is the kind of the error that the process raised."""


@dataclass(frozen=True)
class ProcessSpan:
    """A command in a process."""

    process: str
    """`trainer NAME rank 0`, `sampler NAME`."""
    command: str
    """`OptimStep`, `Sample`."""
    began_ns: int
    """Unix nanoseconds, by the process's clock; if there was no answer, the time of the call."""
    ended_ns: int
    outcome: str
    """`value`, `invalid`, `lost`, `failed`, `broke`, or `unanswered`: cancelled, or the process ended under it."""


OnSpan = Callable[[ProcessSpan], None]
CURRENT: ContextVar[OnSpan | None] = ContextVar("on_span", default=None)
"""The callback of the running task."""


def emit(span: ProcessSpan) -> None:
    """Pass the span of a call that has ended to the callback."""
    if (on_span := CURRENT.get()) is not None:
        on_span(span)


@contextlib.contextmanager
def spans_to(on_span: OnSpan | None) -> Iterator[None]:
    """Pass the spans of calls in the block, and in tasks that it starts, to this callback, which must not raise."""
    token = CURRENT.set(on_span)
    try:
        yield
    finally:
        CURRENT.reset(token)
