"""One server per database: two would each take the other's models and operations for those of a crashed one."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tinker_server.errors import StartFailed

log = logging.getLogger(__name__)
LOCK_KEY = 0x74696E6B6572  # "tinker": of the advisory lock, which PostgreSQL keeps by database
WATCH_S = 5.0
"""A lock that went with its connection is taken again within this time."""
PATIENCE_S = 3.0
"""PostgreSQL notices only after a moment that a killed server's connection is gone."""


def _stop_this_server() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@asynccontextmanager
async def sole_use(
    engine: AsyncEngine,
    unavailable: tuple[type[Exception], ...],
    on_lost: Callable[[], None] = _stop_this_server,
    watch_s: float = WATCH_S,
) -> AsyncIterator[None]:
    """Keep other servers out of the database. Raises StartFailed where there is one.

    `unavailable` are the errors of a database that does not answer. `on_lost` is called where another server took the
    lock while PostgreSQL had ended our connection, which is looked at every `watch_s`.
    """
    if engine.dialect.name == "sqlite":
        with _file_lock(engine.url.database):
            yield
        return
    lock = _AdvisoryLock(engine, unavailable)
    try:
        await lock.take(PATIENCE_S)
        watching = asyncio.create_task(lock.watch(on_lost, watch_s), name="database lock")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])
    finally:
        await lock.close()


@contextlib.contextmanager
def _file_lock(database: str | None) -> Iterator[None]:
    """A file beside the database: to open the database's own once more would release SQLite's locks on it."""
    if not database or database == ":memory:":
        yield
        return
    path = Path(f"{database}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise StartFailed(f"the database {database} cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartFailed(f"another server uses the database {database}") from None
        yield


class _AdvisoryLock:
    """Held by a connection of its own, with which it ends."""

    def __init__(self, engine: AsyncEngine, unavailable: tuple[type[Exception], ...]) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._unavailable = unavailable
        self._connection: AsyncConnection | None = None

    async def take(self, patience_s: float) -> None:
        """Raises StartFailed."""
        shown = self._engine.url.render_as_string(hide_password=True)
        deadline = asyncio.get_running_loop().time() + patience_s
        try:
            while not await self._try():
                if asyncio.get_running_loop().time() > deadline:
                    raise StartFailed(f"another server uses the database {shown}")
                await asyncio.sleep(0.1)
        except self._unavailable as error:
            raise StartFailed(f"the database {shown} cannot be used: {str(error).splitlines()[0]}") from error

    async def _try(self) -> bool:
        connection = await self._engine.connect()
        query = text("SELECT pg_try_advisory_lock(:key)")
        if await connection.scalar(query, {"key": LOCK_KEY}):
            self._connection = connection
            return True
        await connection.close()
        return False

    async def watch(self, on_lost: Callable[[], None], watch_s: float) -> None:
        """Take the lock again where its connection ended."""
        while True:
            await asyncio.sleep(watch_s)
            try:
                if self._connection is not None:
                    await self._connection.execute(text("SELECT 1"))
                    continue
            except self._unavailable:
                log.warning("the connection that holds the database's lock ended; it is taken again")
                await self.close()
            try:
                if await self._try():
                    continue
            except self._unavailable as error:
                log.warning("the database does not answer: %s", str(error).splitlines()[:1])
                continue
            log.critical("another server has taken the database: this one stops")
            on_lost()
            return

    async def close(self) -> None:
        """Give the lock back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*self._unavailable):
                await connection.invalidate()  # not into the pool: the lock would stay
                await connection.close()
