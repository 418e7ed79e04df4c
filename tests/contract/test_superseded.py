"""A server whose lock ended with its connection, and whose database another server has taken since."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.fake_server import Running, forward_backward_body
from tinker_server.errors import Superseded


@pytest.fixture
def stops() -> Iterator[list[int]]:
    """The signals by which a server of this process stops itself."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


LOCKS = (
    "SELECT pid, application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE locktype = 'advisory' AND datname = current_database()"
)

WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'UPDATE lease%'"


@contextlib.contextmanager
def ending_lock(url: str) -> Iterator[None]:
    """As a network or an operator does: the connection that holds the lock ends, and no other. However quickly its
    server takes it again meanwhile, so that another comes first."""
    done = threading.Event()

    async def end() -> None:
        engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            ((_, name),) = await connection.execute(text(LOCKS))
            of_server = text(f"SELECT pg_terminate_backend(pid) FROM ({LOCKS}) AS held WHERE application_name = :name")
            while not done.is_set():
                await connection.execute(of_server, {"name": name})
                await asyncio.sleep(0.02)
        await engine.dispose()

    ending = threading.Thread(target=lambda: asyncio.run(end()))
    ending.start()
    try:
        yield
    finally:
        done.set()
        ending.join()


async def count(url: str, table: str) -> int:
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        found = await connection.scalar(text(f"SELECT count(*) FROM {table}"))
    await engine.dispose()
    return int(found)


def files(data_dir: Path) -> set[str]:
    return {str(path.relative_to(data_dir)) for path in data_dir.rglob("*")}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_server_whose_database_was_taken_accepts_and_writes_nothing(
    database_url: str, tmp_path: Path, stops: list[int]
) -> None:
    first = Running(tmp_path / "a", database_url=database_url)

    def submit(server: Running, number: int) -> "tuple[int, str]":
        headers = {"content-type": "application/x-protobuf"}
        answer = server.http.post("/forward_backward", content=forward_backward_body(model, number), headers=headers)
        return answer.status_code, answer.text

    model = first.model()
    assert submit(first, 1)[0] == 200
    assert first.result(first.sample(first.sampler())).status_code == 200  # it would save it on disk at its end
    with ending_lock(database_url):
        second = Running(tmp_path / "b", database_url=database_url)
    try:
        written, loose = files(tmp_path / "a"), asyncio.run(count(database_url, "loose_directories"))
        services = first.app.state.services
        suspending = asyncio.run_coroutine_threadsafe(services.scheduler.suspend(model), first.loop)
        outcome = suspending.exception(20)
        answers = [submit(first, number) for number in range(2, 10)]
        print(f"suspending: {outcome!r}; submits: {[status for status, _ in answers]}")
        print(f"new files: {sorted(files(tmp_path / 'a') - written)}")
        assert isinstance(outcome, Superseded)
        for status, said in answers:
            assert status == 503 and "another server has taken the database" in said, said
        with pytest.raises(Superseded):
            asyncio.run_coroutine_threadsafe(services.storage.delete("checkpoints/x"), first.loop).result(20)
        assert files(tmp_path / "a") == written
        assert asyncio.run(count(database_url, "futures")) == 3, "the model, its first batch and the sample"
        assert asyncio.run(count(database_url, "loose_directories")) == loose
        assert submit(second, 2)[0] == 200, "the number is free, and the model is the other server's"
        assert stops == [signal.SIGTERM], "stopped once"
    finally:
        first.stop()
        second.stop()
    assert files(tmp_path / "a") <= written, "nor did it write at its end"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_server_that_is_superseded_in_the_middle_of_a_write_ends_it_first(
    database_url: str, tmp_path: Path, stops: list[int]
) -> None:
    """The next server begins with all that was committed: it waits for the write, and so looks at what it gave."""
    first = Running(tmp_path / "a", database_url=database_url)
    writing, started = threading.Event(), threading.Event()

    async def write_until_the_next_waits() -> bool:
        """Return whether it waited, and did not start."""
        engine = create_async_engine(database_url)
        async with first.app.state.services.audit._db.write(), engine.connect() as looking:
            writing.set()
            while not started.is_set() and not await looking.scalar(text(WAITS)):
                await looking.rollback()  # what one transaction sees of other connections stays
                await asyncio.sleep(0.05)
        await engine.dispose()
        return not started.is_set()

    try:
        waited = asyncio.run_coroutine_threadsafe(write_until_the_next_waits(), first.loop)
        assert writing.wait(20)
        with ending_lock(database_url):
            second = Running(tmp_path / "b", database_url=database_url)
        started.set()
        second.stop()
        assert waited.result(20)
    finally:
        started.set()
        first.stop()
    assert len(stops) <= 1
