"""Outages of the database: which errors pass, a log line when it stops answering, and another when it answers again."""

import logging
import sqlite3
import time

from sqlalchemy.exc import DBAPIError

from tinker_server.errors import StartDelayed, StartFailed, start_failure

log = logging.getLogger(__name__)
UNWRITABLE = (
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_DIR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)
"""Errors of a write to a disk that has become read-only."""
_PASSING_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PASSING_STATES = ("08", "53", "57")
"""Classes of PostgreSQL errors that pass (PostgreSQL manual, appendix A): of connections, resources and shutdown."""


class Outage:
    """Follows the outages of `what`: `reads` or `writes`, which may fail alone."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None
        self._num_failed = 0

    def note_failure(self, reason: str) -> None:
        """Note that the database did not answer."""
        self._num_failed += 1
        if self._since is None:
            self._since = time.monotonic()
            log.warning("the database does not answer %s: %s", self._what, reason)

    def note_answer(self) -> None:
        """Note that the database answered."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            text = "the database answers %s again, %.1f s after the first of %d that failed"
            log.warning(text, self._what, seconds, self._num_failed)
            self._since, self._num_failed = None, 0


def unusable(shown: str, error: BaseException) -> StartFailed:
    """Return the failure of a start whose database cannot be used: StartDelayed where the error may pass."""
    text = f"the database {shown} cannot be used: {(str(error) or type(error).__name__).splitlines()[0]}"
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", 0)
    # PostgreSQL's socket is a file, which is not there until it is up.
    passes = isinstance(cause, FileNotFoundError) or code & 0xFF in _PASSING_CODES or code in UNWRITABLE
    passes |= (getattr(cause, "sqlstate", None) or "")[:2] in _PASSING_STATES
    return StartDelayed(text) if passes else start_failure(text, cause)
