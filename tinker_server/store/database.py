"""The database behind a URL: SQLite by default, PostgreSQL by URL. The SQL elsewhere is portable."""

import asyncio
import contextlib
import importlib.resources
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    AdaptedConnection,
    ColumnElement,
    Connection,
    Table,
    delete,
    event,
    inspect,
    make_url,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InvalidRequestError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine

from tinker_server.accounts import WAIT_S, Accounts
from tinker_server.errors import BadRequest, DatabaseUnavailable, DiskFull, StartFailed, Superseded
from tinker_server.store.lease import Lease, sole_use
from tinker_server.store.outage import UNWRITABLE, Outage, unusable
from tinker_server.store.postgresql import CONNECT_S, Connections

if TYPE_CHECKING:
    from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection

T = TypeVar("T")
S = TypeVar("S", AsyncSession, AsyncConnection)
Connect = Callable[[], AbstractAsyncContextManager[AsyncSession]]
RETRY_S, RETRY_PAUSE_S = 30.0, 0.2
"""Seconds for which work is tried again while the database does not answer, and between two tries."""
BUSY_TIMEOUT_MS = 10_000
LISTS_OF_OWNER, LISTS_OF_ALL = 2, 8
"""Lists, searches and long records that are read at once, of an owner and of all. The pool has 15 connections; the
others are for all other work."""
_NO_SHARE = (
    f"lists and searches wait for others of them, for {WAIT_S:g} s: {LISTS_OF_OWNER} of an owner and {LISTS_OF_ALL}"
    " of all owners are read at once; send this one later"
)
DELETED_AT_ONCE = 5_000
"""Rows in a transaction, for which other writers wait."""
SHRUNK_PAGES = 20_000
"""Pages freed at once: about 80 MB, which takes a fraction of a second."""


class Database:
    """Sessions to read and to write. A single transaction writes at a time: SQLite allows no more, and waiting here is
    fair and cheap."""

    def __init__(
        self,
        url: str | URL,
        retry_s: float = RETRY_S,
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
        synchronous: str = "full",
    ) -> None:
        """`retry_s`: how long `look` and `change` retry without an answer; SQLite gives none while it is locked.

        `synchronous` is SQLite's: `full` makes a commit outlive a power loss, `normal` only the end of this process.
        """
        self._retry_s = retry_s
        self._busy_timeout_ms = busy_timeout_ms
        try:
            # SQLite finds a key in JSON only as it is written there, so it is written without escapes.
            serializer = partial(json.dumps, ensure_ascii=False)
            # The ping finds connections that ended while they were idle, with a restarted PostgreSQL: a file has none.
            # Nor does a file's connection need a rollback before its next use, since every transaction here is ended.
            kind = (
                {"pool_reset_on_return": None}
                if make_url(url).get_backend_name() == "sqlite"
                else {"pool_pre_ping": True, "connect_args": {"timeout": CONNECT_S}}
            )
            self._engine = create_async_engine(url, json_serializer=serializer, **kind)
        except (ArgumentError, ImportError, InvalidRequestError) as error:
            raise StartFailed(  # the URL may hold a password
                f"the database URL cannot be used: {error}; it begins with sqlite+aiosqlite:// or postgresql+asyncpg://"
            ) from None
        self._unavailable: tuple[type[Exception], ...] = (DBAPIError, PoolTimeout, OSError)
        self._connections = Connections()
        self.insert = sqlite.insert
        """The dialect's insert, which has on_conflict_do_nothing."""
        reading = self._engine
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine.sync_engine, "connect", partial(_set_up_sqlite, busy_timeout_ms, synchronous))
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
            event.listen(self._engine.sync_engine, "invalidate", self._roll_back_sqlite)
            self._unavailable += (sqlite3.OperationalError,)  # of BEGIN, which SQLAlchemy does not wrap
        else:
            self.insert = postgresql.insert  # type: ignore[assignment]  # the same methods
            import asyncpg  # optional, but installed: the engine could not be made without it

            self._unavailable += (asyncpg.PostgresError,)  # of connecting, which SQLAlchemy does not wrap
            event.listen(self._engine.sync_engine, "connect", self._connections.set_up)
            # All statements of a session see the same state, as SQLite's do.
            reading = self._engine.execution_options(isolation_level="REPEATABLE READ")
        self._writing = self._engine.execution_options(writes=True)
        self._read = async_sessionmaker(reading, expire_on_commit=False)
        self._write = async_sessionmaker(self._writing, expire_on_commit=False)
        self._write_lock = asyncio.Lock()
        self._rolling_back: set[asyncio.Task[None]] = set()
        self.lease = Lease()
        """The right to write, which is never lost outside `sole_use`."""
        self._is_sole = False
        """True from the beginning of `sole_use`."""
        self._lists = Accounts(LISTS_OF_OWNER, LISTS_OF_ALL, _NO_SHARE)
        self._reads, self._writes = Outage("reads"), Outage("writes")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open a session on a consistent state. Raises DatabaseUnavailable."""
        with self._outages(self._reads):
            async with self._read() as session:
                yield session

    @asynccontextmanager
    async def read_of(self, owner: str) -> AsyncIterator[AsyncSession]:
        """Open a session like `read`, for an owner's reads that may take seconds: others wait in turn meanwhile.

        Raises Busy, DatabaseUnavailable.
        """
        async with self._lists.hold(owner), self.read() as session:
            yield session

    def write(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a session whose changes are committed together when the block ends without an error.

        Raises DatabaseUnavailable: the changes may have been committed all the same. Raises Superseded: they were not.
        """
        return self._transaction(self._write.begin())

    def write_rows(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Open a transaction like `write`, without the ORM's session, which would take 0.2 ms: every operation has two
        transactions."""
        return self._transaction(self._writing.begin())

    @asynccontextmanager
    async def _transaction(self, begun: AbstractAsyncContextManager[S]) -> AsyncIterator[S]:
        with self._outages(self._writes):
            async with self._write_lock, begun as transaction:
                await self.lease.require_in(transaction)
                yield transaction

    async def look(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Return what `work` reads. It is retried for a while if the database does not answer."""
        return await self._again(self.read, work)

    async def change(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Commit the changes of `work` together and return its value.

        It is retried for a while if the database does not answer, and may then find its own changes. Raises
        DatabaseUnavailable.
        """
        return await self._again(self.write, work)

    async def _again(self, connect: Connect, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        give_up_at = asyncio.get_running_loop().time() + self._retry_s
        while True:
            try:
                async with connect() as session:
                    return await work(session)
            except Superseded:
                raise
            except DatabaseUnavailable:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    def _roll_back_sqlite(self, connection: AdaptedConnection, *_: object) -> None:
        """End the transaction of a connection that is about to be closed because its caller was cancelled.

        Closing does not end it while a cursor is left, and the traceback of the cancelled call refers to one: nobody
        else could write until that is freed.
        """

        async def roll_back() -> None:
            with contextlib.suppress(ValueError, sqlite3.Error):  # it is closed already
                await connection.driver_connection.rollback()

        task = asyncio.create_task(roll_back(), name="roll back a cancelled transaction")  # begins before the close
        self._rolling_back.add(task)
        task.add_done_callback(self._rolling_back.discard)

    @contextlib.contextmanager
    def _outages(self, outage: Outage) -> Iterator[None]:
        """Turn every failure to answer into DatabaseUnavailable, whose text tells clients nothing of the database."""
        try:
            yield
            outage.note_answer()
        except (IntegrityError, ProgrammingError, DataError, NotSupportedError):
            raise
        except self._unavailable as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            if (getattr(cause, "sqlstate", None) or "")[:2] in _STATEMENTS_FAULTS:
                raise  # the database has answered: a retry would change nothing
            reason = str(cause) or type(error).__name__
            outage.note_failure(reason.splitlines()[0])
            if _is_full(cause):
                raise DiskFull(
                    "the server's disk is full or cannot be written: nothing was stored; try again once there is room"
                ) from error
            raise DatabaseUnavailable("the database does not answer; try again a little later") from error

    async def migrate(self, revision: str = "head") -> None:
        """Migrate the schema to `revision`. Within `sole_use`, this also ends the leases of earlier servers.

        Raises StartFailed if the database cannot be used.
        """
        try:
            if self._engine.dialect.name == "sqlite" and self._engine.url.database:
                await asyncio.to_thread(Path(self._engine.url.database).parent.mkdir, parents=True, exist_ok=True)
            async with self._engine.begin() as connection:
                await connection.run_sync(_upgrade, revision, self.lease if self._is_sole else None)
        except CommandError as error:
            raise StartFailed(
                f"the database {self._safe_url()} was made by a newer version of this server, or by something else:"
                f" {str(error).splitlines()[0]}"
            ) from error
        except (SQLAlchemyError, OSError) as error:
            raise unusable(self._safe_url(), error) from error

    def _safe_url(self) -> str:
        return make_url(self._engine.url).render_as_string(hide_password=True)

    @asynccontextmanager
    async def sole_use(self) -> AsyncIterator[None]:
        """Keep other servers out of the database while the block runs. Raises StartFailed."""
        async with sole_use(self._engine, self._unavailable, self.lease, on_silent=self._connections.abort):
            self._is_sole = True
            yield

    async def shrink(self) -> None:
        """Free disk space that deleted rows held, a part at a time. PostgreSQL does it by itself."""
        if self._engine.dialect.name != "sqlite":
            return
        async with self._engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            async with self._write_lock:
                # As a script: a plain execute would stop after the first page.
                await driver.executescript(f"PRAGMA incremental_vacuum({SHRUNK_PAGES});")
            # Writers go on meanwhile. A reader (a backup, a shell) keeps the log from being truncated. It is not waited
            # for: the log is truncated another time.
            await driver.executescript("PRAGMA wal_checkpoint(PASSIVE); PRAGMA busy_timeout=0;")
            with contextlib.suppress(sqlite3.OperationalError):
                await driver.executescript("PRAGMA wal_checkpoint(TRUNCATE);")
            await driver.executescript(f"PRAGMA busy_timeout={self._busy_timeout_ms};")

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


def _set_up_sqlite(
    busy_timeout_ms: int, synchronous: str, connection: "AsyncAdapt_aiosqlite_connection", _: object
) -> None:
    connection.isolation_level = None  # the driver begins no transactions by itself; _begin_sqlite does
    cursor = connection.cursor()
    # auto_vacuum comes first: it has an effect only on databases that do not exist yet.
    for pragma in (
        "auto_vacuum=INCREMENTAL",
        "journal_mode=WAL",
        f"synchronous={synchronous}",
        "foreign_keys=ON",
        f"busy_timeout={busy_timeout_ms}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
    # SQLite's own function changes only ASCII, so searches would depend on the database.
    connection.create_function("lower", 1, lambda text: None if text is None else text.lower(), deterministic=True)


_STATEMENTS_FAULTS = ("22", "23", "42", "54")
"""Classes of PostgreSQL errors that a statement or its values cause (PostgreSQL manual, appendix A): values that cannot
be stored, constraints, syntax and rights, limits. asyncpg's dialect wraps some of them as any other error."""


def _is_full(error: BaseException | None) -> bool:
    """Return whether the error says that the disk is full or read-only, in SQLite or PostgreSQL."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0)  # absent where the driver made the error itself
        return code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY) or code in UNWRITABLE
    return getattr(error, "sqlstate", "") in ("53100", "25006")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later cannot always get the write lock. So it is taken at once.
    writes = connection.get_execution_options().get("writes", False)
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
    driver = connection.connection.dbapi_connection
    assert isinstance(driver, AdaptedConnection)
    try:
        driver.run_async(lambda raw: raw.execute(begin))  # the dialect's cursor would go to its thread three times
    except asyncio.CancelledError:  # the transaction may have begun, and nobody would end it
        connection.invalidate()
        raise


def _upgrade(connection: Connection, revision: str, lease: Lease | None) -> None:
    """Upgrade the schema. Earlier servers must not write meanwhile, nor after it."""
    is_there = lease is not None and inspect(connection).has_table("lease")
    if lease is not None and is_there:
        lease.take(connection)
    config = Config(attributes={"connection": connection})
    config.set_main_option(
        "script_location", str(importlib.resources.files("tinker_server.migrations")).replace("%", "%%")
    )
    command.upgrade(config, revision)
    if lease is not None and not is_there:
        lease.take(connection)


async def delete_before(db: Database, table: Table, before: float) -> int:
    """Delete the rows whose `at` is before this time, a part at a time; return their number."""
    return await delete_where(db, table, table.c.at < before)


async def delete_where(db: Database, table: Table, condition: ColumnElement[bool]) -> int:
    """Delete the rows that fulfil the condition, a part at a time; return their number."""
    key = tuple(table.primary_key.columns)
    deleted = 0
    while True:
        async with db.write() as session:
            old = (await session.execute(select(*key).where(condition).limit(DELETED_AT_ONCE))).all()
            if old:
                await session.execute(delete(table).where(tuple_(*key).in_([tuple(row) for row in old])))
        deleted += len(old)
        if len(old) < DELETED_AT_ONCE:
            return deleted


def can_be_searched(key: str) -> bool:
    """Return whether SQLite's JSON paths, which have no escape, can name the key."""
    return bool(key) and key.isprintable() and '"' not in key and "\\" not in key


def require_searchable(names: Iterable[str]) -> None:
    """Raise BadRequest for a key of user_metadata that cannot be searched for."""
    for name in names:
        if not can_be_searched(name):
            raise BadRequest(
                f"user_metadata: the key {name!r} cannot be searched for; keys of printable characters can be, without"
                ' quotes (") and backslashes'
            )
