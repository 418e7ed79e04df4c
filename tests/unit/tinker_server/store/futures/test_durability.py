"""The futures' store on a database that refuses, breaks off, or cannot store one result."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import AsyncConnection

from tinker_server.errors import DatabaseUnavailable, DiskFull, UnknownFuture
from tinker_server.store.database import Database
from tinker_server.store.futures.records import Accepted, Operation, Result
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.futures.store import FutureStore

OWNER = "alice"


@pytest.fixture
async def futures(db: Database) -> AsyncIterator[FutureStore]:
    store = FutureStore(db, recent_bytes=1000, max_result_bytes=100_000)
    await store.start()
    yield store
    await store.stop()


def step(seq_id: int, lane: str = "model") -> Operation:
    return Operation("optim_step", lane, seq_id, b"{}", "application/json", OWNER, "digest", 2)


def done(body: str = "{}") -> Result:
    return Result(body.encode(), "application/json")


def locked() -> DatabaseUnavailable:
    return DatabaseUnavailable("the database does not answer")


async def test_a_result_is_answered_once_it_is_stored_and_not_before(
    futures: FutureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = (await futures.queue.enqueue(step(1))).request_id
    finish, refusals = FutureRows.finish, 1

    async def refuse_once(self: FutureRows, results: list[tuple[str, Result]]) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise locked()
        await finish(self, results)

    monkeypatch.setattr(FutureRows, "finish", refuse_once)
    futures.queue.complete(request_id, done())
    assert await futures.wait(request_id, OWNER, 0.2) is None
    assert await futures.wait(request_id, OWNER, 10) is not None
    assert not refusals


async def test_a_result_larger_than_can_be_stored_fails_by_name(futures: FutureStore) -> None:
    request_id = (await futures.queue.enqueue(step(1))).request_id
    futures.queue.complete(request_id, done("x" * 100_001))
    result = await futures.wait(request_id, OWNER, 10)
    assert result is not None and result.failed and b"100001 bytes, and 100000 can be stored" in result.body


async def test_one_result_that_the_database_does_not_take_stops_no_other(
    futures: FutureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FutureRows.finish

    async def refuse_large(self: FutureRows, results: list[tuple[str, Result]]) -> None:
        if any(len(result.body) > 10_000 for _, result in results):
            raise DataError("UPDATE futures", {}, Exception("string or blob too big"))
        await finish(self, results)

    monkeypatch.setattr(FutureRows, "finish", refuse_large)
    accepted = [await futures.queue.enqueue(step(number)) for number in range(5)]
    for number, one in enumerate(accepted):
        futures.queue.complete(one.request_id, done("x" * 10_001 if number == 2 else "{}"))
    other = await futures.queue.enqueue(step(9, "another model"))
    futures.queue.complete(other.request_id, done())
    async with asyncio.timeout(10):
        results = [await futures.wait(one.request_id, OWNER, 10) for one in [*accepted, other]]
    assert [result is not None and result.failed for result in results] == [False, False, True, False, False, False]
    assert results[2] is not None and b"could not be stored" in results[2].body
    assert b"SQL" not in results[2].body


def fail_after_commits(monkeypatch: pytest.MonkeyPatch, times: int) -> Callable[[], int]:
    """Break the connection `times` times just after a commit; return a function that says how often it still will."""
    write, left = Database.write_rows, times

    @asynccontextmanager
    async def broken(self: Database) -> AsyncIterator[AsyncConnection]:
        nonlocal left
        async with write(self) as session:
            yield session
        if left:
            left -= 1
            raise locked()

    monkeypatch.setattr(Database, "write_rows", broken)
    return lambda: left


async def test_a_connection_lost_at_commit_neither_loses_nor_doubles(
    futures: FutureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = fail_after_commits(monkeypatch, 1)
    operation = step(1)
    assert await futures.queue.enqueue(operation) == Accepted(operation.request_id, is_new=True)
    assert not left()
    assert await futures.queue.enqueue(step(1)) == Accepted(operation.request_id, is_new=False)


async def test_an_operation_that_was_stored_without_an_answer_is_adopted_by_its_repeat(
    futures: FutureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after_commits(monkeypatch, 2)
    lost = step(1)
    with pytest.raises(DatabaseUnavailable):
        await futures.queue.enqueue(lost)
    started = time.monotonic()
    assert await futures.wait(lost.request_id, OWNER, 0.3) is None
    assert time.monotonic() - started > 0.25, "a poll is held, whoever asks"
    repeats = await asyncio.gather(*(futures.queue.enqueue(step(1)) for _ in range(3)))
    assert sorted(one.is_new for one in repeats) == [False, False, True]
    assert {one.request_id for one in repeats} == {lost.request_id}
    futures.queue.complete(lost.request_id, done())
    assert await futures.wait(lost.request_id, OWNER, 10) is not None


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_database_that_another_program_has_locked_does_not_answer_and_then_does(
    db: Database, futures: FutureStore, tmp_path: Path
) -> None:
    async with db.write() as session:
        await session.execute(text("PRAGMA busy_timeout=50"))  # of the one connection there is
    with contextlib.closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnavailable):
            await futures.queue.enqueue(step(1))
        other.execute("ROLLBACK")
    assert (await futures.queue.enqueue(step(1))).is_new


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_connections_that_were_cut_are_made_again(database_url: str) -> None:
    db, admin = Database(database_url), Database(database_url)
    await db.migrate()
    futures = FutureStore(db, recent_bytes=0)
    await futures.start()
    for number in range(3):
        async with admin.read() as session:
            cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            await session.execute(text(f"{cut} AND pid <> pg_backend_pid()"))
        operation = step(number)
        assert await futures.queue.enqueue(operation) == Accepted(operation.request_id, is_new=True)
        async with admin.read() as session:
            await session.execute(text(f"{cut} AND pid <> pg_backend_pid()"))
        futures.queue.complete(operation.request_id, done())
        async with asyncio.timeout(20):
            while True:
                try:
                    if await futures.wait(operation.request_id, OWNER, 10) is not None:
                        break
                except UnknownFuture:
                    raise
                except Exception:  # noqa: BLE001 - reading is not tried again by the server: the client does
                    await asyncio.sleep(0.1)
    await futures.stop()
    await db.close()
    await admin.close()


async def test_results_expire_while_others_keep_coming(futures: FutureStore) -> None:
    stopping = False

    async def work(lane: str) -> None:
        number = 0
        while not stopping:
            number += 1
            accepted = await futures.queue.enqueue(step(number, lane))
            futures.queue.complete(accepted.request_id, done())

    tasks = [asyncio.create_task(work(f"model {number}")) for number in range(50)]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        await futures.expire(time.time() - 3600)
    stopping = True
    await asyncio.gather(*tasks)


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_acknowledging_very_many_results_stops_no_submit(futures: FutureStore) -> None:
    futures.acknowledge("model", [f"{number:032x}" for number in range(200_000)])
    slowest = 0.0
    for number in range(20):
        started = time.monotonic()
        await futures.queue.enqueue(step(number, "another model"))
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 1.0


async def test_a_clock_set_back_hides_no_finished_sample(db: Database) -> None:
    now = 2_000_000_000.0
    first = FutureStore(db, recent_bytes=0, clock=lambda: now)
    await first.start()
    early = (await first.queue.enqueue(step(1, "sampler"))).request_id
    first.queue.complete(early, done())
    await first.stop()
    second = FutureStore(db, recent_bytes=0, clock=lambda: now - 3600)
    await second.start()
    late = (await second.queue.enqueue(step(2, "sampler"))).request_id
    second.queue.complete(late, done())
    await second.queue.flush()
    early_row, late_row = [await second.wait(one, OWNER, 5) for one in (early, late)]
    assert early_row is not None and late_row is not None and late_row.finished_at > early_row.finished_at
    await second.rows.expire(now + 100, 0)  # the results; their rows stay
    await second.stop()
    third = FutureStore(db, recent_bytes=0, clock=lambda: now - 3600)
    await third.start()
    latest = (await third.queue.enqueue(step(3, "sampler"))).request_id
    third.queue.complete(latest, done())
    latest_row = await third.wait(latest, OWNER, 5)
    assert latest_row is not None and latest_row.finished_at > late_row.finished_at
    await third.stop()


async def test_a_full_disk_refuses_by_name_and_a_retry_is_stored_once_there_is_room(tmp_path: Path) -> None:
    pages = 60

    def limit(connection: Any, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")

    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
    event.listen(db._engine.sync_engine, "connect", limit)
    await db.migrate()
    futures = FutureStore(db, recent_bytes=0)
    await futures.start()
    large = replace(step(1), body=b"x" * 1_000_000)
    with pytest.raises(DiskFull, match="full"):
        await futures.queue.enqueue(large)
    pages = 10_000
    await db.close()  # so that connections are made anew
    assert (await futures.queue.enqueue(large)).is_new
    await futures.stop()
    await db.close()


async def test_commits_are_synchronous_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    for synchronous, expected in ((None, 2), ("normal", 1)):
        given: dict[str, Any] = {} if synchronous is None else {"synchronous": synchronous}
        db = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}", **given)
        async with db.read() as session:
            assert await session.scalar(text("PRAGMA synchronous")) == expected
        await db.close()
