"""The database as the server holds it: alone, and through locks, outages and other versions."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.fakes import FakeBackend
from tinker_server.app import serving
from tinker_server.errors import DatabaseUnavailable, StartFailed
from tinker_server.settings import Settings
from tinker_server.store.audit import AuditStore
from tinker_server.store.database import Database
from tinker_server.store.lease import sole_use


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    db = Database(database_url, retry_s=5)
    await db.migrate()
    yield db
    await db.close()


@contextlib.contextmanager
def locked(file: Path) -> Any:
    """Another program is writing to an SQLite database."""
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.execute("ROLLBACK")
    other.close()


async def end_connections(url: str) -> None:
    """As a restart of PostgreSQL does to all its clients."""
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        await connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    await engine.dispose()


async def test_a_second_server_on_one_database_is_refused_in_one_line(tmp_path: Path, database_url: str) -> None:
    first, second = (Settings(data_dir=tmp_path / name, database_url=database_url) for name in ("a", "b"))
    async with serving(first, FakeBackend()) as services:
        await services.audit.note("something", "alice")
        with pytest.raises(StartFailed, match="another server uses the database") as caught:
            async with serving(second, FakeBackend()):
                pass
        assert "\n" not in str(caught.value)
        assert len(await services.audit.of_day("alice", time.time() - 60, ("",))) == 1
    async with serving(second, FakeBackend()):
        pass


@pytest.mark.flaky(reruns=2)
async def test_a_lock_that_went_with_its_connection_is_taken_again_or_the_server_stops(database_url: str) -> None:
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite's lock is a file's, and ends with the process alone")
    engine, other = (create_async_engine(database_url, pool_pre_ping=True) for _ in range(2))
    lost = asyncio.Event()
    async with sole_use(engine, (Exception,), lost.set, watch_s=0.2):
        await end_connections(database_url)
        await asyncio.sleep(1)
        with pytest.raises(StartFailed, match="another server"):
            async with sole_use(other, (Exception,)):
                pass
        assert not lost.is_set()
        await end_connections(database_url)
        async with sole_use(other, (Exception,)):
            await asyncio.wait_for(lost.wait(), 10)
    await engine.dispose()
    await other.dispose()


async def test_a_change_outlasts_the_end_of_every_connection(db: Database, database_url: str) -> None:
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite has no connections to lose")
    audit = AuditStore(db)
    for number in range(3):
        await audit.note(f"event {number}", "alice")
        await end_connections(database_url)
    await audit.note("last", "alice")
    assert [entry.event for entry in await audit.of_day("alice", time.time() - 60, ("",))] == [
        "event 0",
        "event 1",
        "event 2",
        "last",
    ]


async def test_a_change_waits_for_a_lock_longer_than_sqlite_does(tmp_path: Path) -> None:
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", retry_s=10, busy_timeout_ms=100)
    await db.migrate()
    audit = AuditStore(db)
    with locked(tmp_path / "a.db"):
        noting = asyncio.create_task(audit.note("event", "alice"))
        await asyncio.sleep(1)
        assert not noting.done()
        with pytest.raises(DatabaseUnavailable) as caught:
            async with db.write() as session:
                await session.execute(text("SELECT 1"))
        assert "locked" not in str(caught.value) and "SQL" not in str(caught.value)
    await noting
    assert len(await audit.of_day("alice", time.time() - 60, ("",))) == 1
    await db.close()


@pytest.mark.flaky(reruns=2)
async def test_shrinking_makes_no_writer_wait_for_who_reads_the_database(tmp_path: Path) -> None:
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")
    await db.migrate()
    audit = AuditStore(db)
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


async def test_a_database_of_a_newer_server_is_refused_in_one_line(db: Database, database_url: str) -> None:
    async with db.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    newer = Database(database_url)
    with pytest.raises(StartFailed, match=r"newer version of this server.*9999") as caught:
        await newer.migrate()
    assert "\n" not in str(caught.value)
    await newer.close()


@pytest.mark.parametrize("value", ["a\0b", "half a pair \ud800"])
async def test_what_the_database_cannot_hold_is_no_outage(db: Database, value: str) -> None:
    """SQLite holds a NUL; a half of a pair reaches neither."""
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
