"""The server's hold on its database, alone and through locks, outages and other versions."""

import asyncio
import contextlib
import gc
import logging
import re
import resource
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.fakes import FakeBackend
from tinker_server.accounts import Records
from tinker_server.app import serving
from tinker_server.errors import DatabaseUnavailable, StartDelayed, StartFailed, Superseded
from tinker_server.settings import Settings
from tinker_server.store.audit import AuditStore
from tinker_server.store.database import Database
from tinker_server.store.lease import Lease, sole_use


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    db = Database(database_url, retry_s=5)
    await db.migrate()
    yield db
    await db.close()


@contextlib.contextmanager
def locked(file: Path) -> Any:
    """Hold an SQLite database's write lock, as another program would."""
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.execute("ROLLBACK")
    other.close()


async def end_connections(url: str) -> None:
    """End all connections, as a restart of PostgreSQL does."""
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        await connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    await engine.dispose()


async def noted(audit: AuditStore) -> list[str]:
    """Alice's events of the last minute."""
    return [one.event async for page in audit.of_day("alice", time.time() - 60, ("",)) for one in page]


async def test_a_second_server_on_one_database_is_refused_in_one_line(tmp_path: Path, database_url: str) -> None:
    first, second = (Settings(data_dir=tmp_path / name, database_url=database_url) for name in ("a", "b"))
    async with serving(first, FakeBackend()) as services:
        await services.audit.note("something", "alice")
        with pytest.raises(StartDelayed, match="another server uses the database") as caught:
            async with serving(second, FakeBackend()):
                pass
        assert "\n" not in str(caught.value)
        assert await noted(services.audit) == ["something"]
    async with serving(second, FakeBackend()):
        pass


async def start(data_dir: Path, url: str = "") -> StartFailed:
    """Return what a start on this database fails with."""
    with pytest.raises(StartFailed) as caught:
        async with serving(Settings(data_dir=data_dir, database_url=url), FakeBackend()):
            pass
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_start_says_whether_its_failure_may_pass(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (f"127.0.0.1:{port}/db", f"/db?host={tmp_path}"):  # none is up there yet
        assert isinstance(await start(tmp_path / "a", f"postgresql+asyncpg://user@{address}"), StartDelayed)
    (tmp_path / "file").write_text("no database" * 1000)
    assert not isinstance(await start(tmp_path / "a", f"sqlite+aiosqlite:///{tmp_path / 'file'}"), StartDelayed)
    assert not isinstance(await start(tmp_path / "file" / "data"), StartDelayed)


async def test_a_start_on_a_full_disk_may_succeed_later(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        failed = await start(tmp_path / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(failed, StartDelayed), failed


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_start_on_a_database_that_does_not_exist_needs_another_setting(
    tmp_path: Path, database_url: str
) -> None:
    missing = make_url(database_url).set(database="missing").render_as_string(hide_password=False)
    assert not isinstance(await start(tmp_path, missing), StartDelayed)


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_a_lock_that_was_lost_with_its_connection_is_taken_again_or_the_server_stops(database_url: str) -> None:
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite's lock is a file's, and ends with the process alone")
    lost = asyncio.Event()
    async with contextlib.AsyncExitStack() as engines:
        engine, other = (create_async_engine(database_url, pool_pre_ping=True) for _ in range(2))
        for one in (engine, other):
            engines.push_async_callback(one.dispose)
        async with sole_use(engine, (Exception,), Lease(lost.set), watch_s=0.2):
            await end_connections(database_url)
            await asyncio.sleep(1)
            with pytest.raises(StartFailed, match="another server"):
                async with sole_use(other, (Exception,), Lease()):
                    pass
            assert not lost.is_set()
            for _ in range(10):  # its watch may be quicker than the other
                await end_connections(database_url)
                with contextlib.suppress(StartFailed):
                    async with sole_use(other, (Exception,), Lease()):
                        await asyncio.wait_for(lost.wait(), 10)
                    break
            assert lost.is_set()


async def test_a_server_notices_another_that_started_and_ended_meanwhile(database_url: str) -> None:
    """The lock is free again, but what the predecessor has in memory is not what is in the database."""
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite's lock is a file's, and ends with the process alone")
    first, second = Database(database_url), Database(database_url)
    engine = create_async_engine(database_url)
    await first.migrate()
    lost = asyncio.Event()
    lease = Lease(lost.set)
    async with sole_use(engine, (Exception,), lease, watch_s=0.2):
        async with engine.begin() as connection:
            await connection.run_sync(lease.take)
        await end_connections(database_url)
        await asyncio.sleep(1)
        assert not lost.is_set(), "it takes its own lock again"
        for _ in range(10):  # its watch may be quicker than the other
            await end_connections(database_url)
            with contextlib.suppress(StartFailed):
                async with second.sole_use():
                    await second.migrate()
                break
        await asyncio.wait_for(lost.wait(), 10)
        with pytest.raises(Superseded, match="another server has taken the database"):
            lease.require()
    for one in (engine, first, second):
        await (one.dispose() if isinstance(one, AsyncEngine) else one.close())


@pytest.mark.parametrize("url", ["sqlite:////tmp/a.db", "postgresql://a:secret@b/c", "a.db"])
def test_a_url_of_no_driver_that_is_used_here_is_refused_by_name(url: str) -> None:
    expected = "the database URL cannot be used: .*; it begins with sqlite.aiosqlite:// or postgresql.asyncpg://"
    with pytest.raises(StartFailed, match=expected) as refused:
        Database(url)
    assert "secret" not in str(refused.value)


async def test_an_outage_is_two_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinker_server")
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", retry_s=10, busy_timeout_ms=50)
    await db.migrate()
    audit = AuditStore(db, Records())
    with locked(tmp_path / "a.db"):
        noting = asyncio.create_task(audit.note("event", "alice"))
        await asyncio.sleep(2)
        await noted(audit)
    await noting
    began, ended = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert began == "the database does not answer writes: database is locked"
    found = re.fullmatch(r"the database answers writes again, (.+) s after the first of (\d+) that failed", ended)
    assert found is not None and 1.5 < float(found[1]) < 5 and 4 < int(found[2]) < 12, ended
    await db.close()


async def test_a_tcp_connection_ends_by_itself_if_the_other_end_is_gone(database_url: str) -> None:
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite has no connections to lose")
    url = make_url(database_url)
    far = (str(url.host or url.query["host"]), url.port or 5432)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = asyncio.open_unix_connection(f"{far[0]}/.s.PGSQL.{far[1]}")
        far_reader, far_writer = await (opened if far[0].startswith("/") else asyncio.open_connection(*far))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        db = Database(url.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False))
        async with db.read() as session:
            adapted = await (await session.connection()).get_raw_connection()
            found = adapted.driver_connection._transport.get_extra_info("socket")  # type: ignore[union-attr]
            for level, option, least, most in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5, 15),
                (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000, 30_000),
            ):
                assert least <= found.getsockopt(level, option) <= most
            assert await session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"
        await db.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


async def test_a_change_outlasts_the_end_of_every_connection(db: Database, database_url: str) -> None:
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite has no connections to lose")
    audit = AuditStore(db, Records())
    for number in range(3):
        await audit.note(f"event {number}", "alice")
        await end_connections(database_url)
    await audit.note("last", "alice")
    assert await noted(audit) == [
        "event 0",
        "event 1",
        "event 2",
        "last",
    ]


async def test_a_change_waits_for_a_lock_longer_than_sqlite_does(tmp_path: Path) -> None:
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", retry_s=10, busy_timeout_ms=100)
    await db.migrate()
    audit = AuditStore(db, Records())
    with locked(tmp_path / "a.db"):
        noting = asyncio.create_task(audit.note("event", "alice"))
        await asyncio.sleep(1)
        assert not noting.done()
        with pytest.raises(DatabaseUnavailable) as caught:
            async with db.write() as session:
                await session.execute(text("SELECT 1"))
        assert "locked" not in str(caught.value) and "SQL" not in str(caught.value)
    await noting
    assert await noted(audit) == ["event"]
    await db.close()


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_shrinking_makes_no_writer_wait_for_a_reader(tmp_path: Path) -> None:
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")
    await db.migrate()
    audit = AuditStore(db, Records())
    await audit.note("before", "alice")
    reader = sqlite3.connect(tmp_path / "a.db", isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM audit").fetchall()
    await audit.note("meanwhile", "alice")
    started = time.perf_counter()
    shrinking = asyncio.create_task(db.shrink())
    await asyncio.sleep(0.05)
    await audit.note("after", "alice")
    await shrinking
    assert time.perf_counter() - started < 2
    reader.close()
    await db.close()


async def test_a_session_reads_one_state_though_others_write_meanwhile(db: Database) -> None:
    audit, count = AuditStore(db, Records()), text("SELECT count(*) FROM audit")
    for number in range(3):  # what one session has set must not be left to the next user of its connection
        async with db.read() as session:
            assert await session.scalar(count) == number
            await audit.note("meanwhile", "alice")
            assert await session.scalar(count) == number
    async with db.read() as session:
        assert await session.scalar(count) == 3


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_writer_sees_what_others_have_committed_since_it_began(db: Database) -> None:
    level = text("SHOW transaction_isolation")
    for _ in range(2):
        async with db.read() as session:
            assert await session.scalar(level) == "repeatable read"
        async with db.write() as session:
            assert await session.scalar(level) == "read committed"


async def test_a_database_of_a_newer_server_is_refused_in_one_line(db: Database, database_url: str) -> None:
    async with db.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    newer = Database(database_url)
    with pytest.raises(StartFailed, match=r"newer version of this server.*9999") as caught:
        await newer.migrate()
    assert "\n" not in str(caught.value)
    await newer.close()


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.parametrize("value", ["a\0b", "half a pair \ud800"])
async def test_a_value_that_the_database_cannot_store_is_no_outage(db: Database, value: str) -> None:
    """SQLite stores a NUL; half of a surrogate pair can be sent to neither."""
    began = time.monotonic()

    async def look(session: Any) -> object:
        return await session.scalar(text("SELECT CAST(:value AS TEXT)"), {"value": value})

    try:
        await db.look(look)
    except DatabaseUnavailable as error:
        pytest.fail(f"taken for an outage: {error}")
    except Exception as error:  # noqa: BLE001 - any other tells what is wrong
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert time.monotonic() - began < 2


async def test_a_caller_that_is_cancelled_at_any_moment_leaves_no_transaction_open(db: Database) -> None:
    async def use(writes: bool) -> None:
        async with db.write() if writes else db.read() as session:
            await session.scalar(text("SELECT 1"))

    for number in range(120):
        using = asyncio.create_task(use(number % 2 == 0))
        for _ in range(number // 2):
            await asyncio.sleep(0)
        using.cancel()
        await asyncio.wait([using])
        async with asyncio.timeout(5):
            await asyncio.gather(use(True), use(False), use(True), use(False))
    gc.collect()
