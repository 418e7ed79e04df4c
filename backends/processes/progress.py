"""Report how far a process has loaded."""

import time
from collections.abc import Callable, Iterable

from tinker_server.backends.protocol import Loading

_PAUSE_S = 0.1
"""Time between two reports of bytes."""


class Progress:
    """Progress of a process; not thread-safe."""

    def __init__(self, emit: Callable[[Loading], None] = lambda loading: None) -> None:
        self._emit = emit
        self._doing, self._done_bytes, self._total_bytes = "", 0, 0
        self._emitted_at = 0.0

    def does(self, doing: str, total_bytes: int = 0) -> None:
        """Begin another phase, which ends when `total_bytes` are loaded, if that is known."""
        self._doing, self._done_bytes, self._total_bytes = doing, 0, total_bytes
        self._report()

    def did(self, phases: Iterable[tuple[str, float]]) -> None:
        """Report what was done until now, each with the seconds since it began, in place of what is reported since
        then."""
        for doing, began_s_ago in phases:
            self._emit(Loading(doing, began_s_ago=began_s_ago))

    def loaded(self, num_bytes: int) -> None:
        """Count bytes that have been loaded."""
        self._done_bytes += num_bytes
        if self._done_bytes == self._total_bytes or time.monotonic() - self._emitted_at > _PAUSE_S:
            self._report()

    def _report(self) -> None:
        self._emitted_at = time.monotonic()
        self._emit(Loading(self._doing, self._done_bytes, self._total_bytes))
