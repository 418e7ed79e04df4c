"""One server per database: each of two would take the other's models and operations for those of a crashed server.

A lock keeps a second server from starting. PostgreSQL releases it with the connection that holds it, whose end the
first server learns of late. So every transaction that writes also checks that no server has taken the database since.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from tinker_server.errors import StartDelayed, Superseded, start_failure
from tinker_server.store.outage import unusable

log = logging.getLogger(__name__)
LOCK_KEY = 0x74696E6B6572  # "tinker": key of the advisory lock, which PostgreSQL keeps by database
WATCH_S = 5.0
"""A lock that was lost with its connection is taken again within this time."""
SILENCE_S = 10.0
"""A database that does not answer for so long is gone: `SELECT 1` waits for no other statement."""
PATIENCE_S = 3.0
"""PostgreSQL takes a moment to notice that a killed server's connection is gone."""


def _stop_this_server() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Lease:
    """This server's right to write. It ends for good when another server takes the database."""

    def __init__(self, on_lost: Callable[[], None] = _stop_this_server) -> None:
        self._on_lost = on_lost
        self._epoch: int | None = None
        """None for a file's lock, which only ends with the process, and before the lease is taken."""
        self.is_lost = False

    def take(self, connection: Connection) -> None:
        """End the leases of all earlier servers when the transaction is committed; it waits for their last writes."""
        if connection.dialect.name != "sqlite":
            self._epoch = connection.scalar(text("UPDATE lease SET epoch = epoch + 1 RETURNING epoch"))
            assert self._epoch is not None, "the migration puts a row there, and without it nothing would be fenced"

    @property
    def is_taken(self) -> bool:
        """True if another server's lease can be distinguished from this lease."""
        return self._epoch is not None

    def require(self) -> None:
        """Raise Superseded if the lease is known to be lost."""
        if self.is_lost:
            raise Superseded("another server has taken the database: this one stops, and writes nothing more")

    async def require_in(self, transaction: AsyncSession | AsyncConnection) -> None:
        """Raise Superseded if the lease is lost. If not, it lasts until the transaction's end."""
        self.require()
        if self._epoch is not None:
            # The row's lock makes the next server wait for this transaction before it looks at the database.
            self._compare(await transaction.scalar(text("SELECT epoch FROM lease FOR SHARE")))
            self.require()

    async def holds(self, connection: AsyncConnection) -> bool:
        """Return whether no other server has taken the database so far."""
        if self._epoch is not None:
            self._compare(await connection.scalar(text("SELECT epoch FROM lease")))
        return not self.is_lost

    def _compare(self, epoch: int | None) -> None:
        if epoch != self._epoch:
            self.lose()

    def lose(self) -> None:
        """End the lease, since another server has the database."""
        if not self.is_lost:
            self.is_lost = True
            log.critical("another server has taken the database: this one stops")
            self._on_lost()


@asynccontextmanager
async def sole_use(
    engine: AsyncEngine,
    unavailable: tuple[type[Exception], ...],
    lease: Lease,
    watch_s: float = WATCH_S,
    on_silent: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Keep other servers out of the database. Raises StartFailed if another has it.

    `unavailable` are the errors of a database that does not answer. Every `watch_s` the lock is checked: the lease ends
    if another server has the database, and `on_silent` is called if the database does not answer. `on_silent` must end
    all connections: nothing else would, if a network loses packets silently.
    """
    if engine.dialect.name == "sqlite":
        with _file_lock(engine.url.database):
            yield
        return
    lock = _AdvisoryLock(engine, unavailable, on_silent)
    try:
        await lock.take(PATIENCE_S)
        watching = asyncio.create_task(lock.watch(lease, watch_s), name="database lock")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])
    finally:
        await lock.close()


@contextlib.contextmanager
def _file_lock(database: str | None) -> Iterator[None]:
    """Lock a file beside the database: opening the database file once more would release SQLite's locks on it."""
    if not database or database == ":memory:":
        yield
        return
    with lock_file(Path(f"{database}.lock"), f"the database {database}"):
        yield


@contextlib.contextmanager
def lock_file(path: Path, what: str) -> Iterator[None]:
    """Lock a file, which is made, against other servers. Raises StartFailed, with `what` it is the lock of."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise start_failure(f"{what} cannot be used: {error.strerror}", error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartDelayed(f"another server uses {what}") from None
        yield


async def _is_done(task: "asyncio.Task[None]") -> bool:
    """Return whether a task ends within `SILENCE_S`. Waits twice: an answer may be unread while the loop is busy."""
    for _ in range(2):
        done, _pending = await asyncio.wait([task], timeout=SILENCE_S / 2)
        if done:
            return True
    return False


class _AdvisoryLock:
    """PostgreSQL's lock. A connection of its own holds it, and it ends with that."""

    def __init__(
        self, engine: AsyncEngine, unavailable: tuple[type[Exception], ...], on_silent: Callable[[], None]
    ) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._unavailable = unavailable
        self._on_silent = on_silent
        self._connection: AsyncConnection | None = None

    async def take(self, patience_s: float) -> None:
        """Take the lock within `patience_s`. Raises StartFailed."""
        shown = self._engine.url.render_as_string(hide_password=True)
        deadline = asyncio.get_running_loop().time() + patience_s
        try:
            while not await self._try():
                if asyncio.get_running_loop().time() > deadline:
                    raise StartDelayed(f"another server uses the database {shown}")
                await asyncio.sleep(0.1)
        except self._unavailable as error:
            raise unusable(shown, error) from error

    async def _try(self) -> bool:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(self._engine.connect())
            query = text("SELECT pg_try_advisory_lock(:key)")
            if not await connection.scalar(query, {"key": LOCK_KEY}):
                return False
            self._connection = connection
            stack.pop_all()
            return True

    async def watch(self, lease: Lease, watch_s: float) -> None:
        """Take the lock again whenever its connection has ended, until the lease is lost."""
        while not lease.is_lost:
            await asyncio.sleep(watch_s)
            looking = asyncio.create_task(self._check(lease), name="check the database lock")
            try:
                while not await _is_done(looking):
                    self._on_silent()
            finally:
                looking.cancel()
                await asyncio.wait([looking])

    async def _check(self, lease: Lease) -> None:
        if self._connection is not None:
            try:
                await self._connection.execute(text("SELECT 1"))
                return
            except self._unavailable:
                log.warning("lost the connection holding the database lock; reacquiring it")
                await self.close()
        with contextlib.suppress(*self._unavailable):  # it is retried, and the transactions that fail are logged
            await self._take_again(lease)

    async def _take_again(self, lease: Lease) -> None:
        if await self._try():
            assert self._connection is not None
            await lease.holds(self._connection)  # a server may have started and ended meanwhile
            return
        if not lease.is_taken:
            lease.lose()
            return
        # PostgreSQL may think for a while that our last connection is alive, and keep its lock.
        async with self._engine.connect() as connection:
            await lease.holds(connection)

    async def close(self) -> None:
        """Release the lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*self._unavailable):
                await connection.invalidate()  # back in the pool it would keep the lock
                await connection.close()
