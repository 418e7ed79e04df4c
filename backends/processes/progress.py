"""What a process says of itself while it gets ready."""

import time
from collections.abc import Callable

from backends.protocol import Loading

_PAUSE_S = 0.1
"""Between two counts of bytes that are told."""


class Progress:
    """One process's; used by one thread at a time."""

    def __init__(self, tell: Callable[[Loading], None] = lambda loading: None) -> None:
        self._tell = tell
        self._doing, self._done_bytes, self._total_bytes = "", 0, 0
        self._told_at = 0.0

    def does(self, doing: str, total_bytes: int = 0) -> None:
        """Something else begins; `total_bytes` of `loaded` will be the end of it, where that is known."""
        self._doing, self._done_bytes, self._total_bytes = doing, 0, total_bytes
        self._say()

    def loaded(self, num_bytes: int) -> None:
        """So many more are there."""
        self._done_bytes += num_bytes
        if self._done_bytes == self._total_bytes or time.monotonic() - self._told_at > _PAUSE_S:
            self._say()

    def _say(self) -> None:
        self._told_at = time.monotonic()
        self._tell(Loading(self._doing, self._done_bytes, self._total_bytes))
