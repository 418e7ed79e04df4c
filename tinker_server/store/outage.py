"""Outages of the database: one log line when it stops answering, and one when it answers again."""

import logging
import time

log = logging.getLogger(__name__)


class Outage:
    """Follows the outages of `what`: `reads` or `writes`, which may fail alone."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None
        self._num_failed = 0

    def failed(self, reason: str) -> None:
        """Note that the database did not answer."""
        self._num_failed += 1
        if self._since is None:
            self._since = time.monotonic()
            log.warning("the database does not answer %s: %s", self._what, reason)

    def answered(self) -> None:
        """Note that the database answered."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            text = "the database answers %s again, %.1f s after the first of %d that failed"
            log.warning(text, self._what, seconds, self._num_failed)
            self._since, self._num_failed = None, 0
