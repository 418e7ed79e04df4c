"""Weights are packed as one file."""

import asyncio
import errno
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinker_server.errors import DiskFull
from tinker_server.store import holdings
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.weights import archives as packing
from tinker_server.weights.archives import Archives

DIRECTORY = "checkpoints/run/weights/a~1"


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
    await db.migrate()
    yield Storage(tmp_path, db)
    await db.close()


@pytest.fixture
def archives(storage: Storage, tmp_path: Path) -> Iterator[Archives]:
    (tmp_path / DIRECTORY).mkdir(parents=True)
    (tmp_path / DIRECTORY / "file").write_bytes(os.urandom(20_000_000))
    archives = Archives(storage, Holdings(storage._db, storage, 1000, 1))
    yield archives
    archives.close()


def packed(data_dir: Path) -> list[Path]:
    """Return the archives, whole or being written."""
    return list((data_dir / "archives").iterdir()) if (data_dir / "archives").exists() else []


async def begun(data_dir: Path) -> None:
    for _ in range(1000):
        if packed(data_dir):
            return
        await asyncio.sleep(0.001)


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_an_archive_is_packed_once_for_all_who_ask_and_other_threads_stay_free(
    archives: Archives, tmp_path: Path
) -> None:
    asked = [asyncio.create_task(archives.get(DIRECTORY, "alice")) for _ in range(50)]
    await begun(tmp_path)
    started = time.perf_counter()
    await asyncio.to_thread(lambda: None)
    assert time.perf_counter() - started < 0.2
    assert not any(task.done() for task in asked), "it was packed too fast to show anything"
    assert [path.name[0] for path in packed(tmp_path)] == ["."]
    (archive,) = set(await asyncio.gather(*asked))
    with tarfile.open(archive) as tar:
        assert tar.getmember("file").size == 20_000_000


async def test_a_request_that_ends_does_not_stop_the_packing_for_others(archives: Archives) -> None:
    first, second = (asyncio.create_task(archives.get(DIRECTORY, "alice")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    assert (await second).exists()


async def test_no_archive_stays_of_weights_that_were_deleted_meanwhile(
    archives: Archives, storage: Storage, tmp_path: Path
) -> None:
    asked = asyncio.create_task(archives.get(DIRECTORY, "alice"))
    await begun(tmp_path)
    await storage.delete(DIRECTORY)
    with pytest.raises(FileNotFoundError):
        await asked
    assert not packed(tmp_path)


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.heavy
async def test_an_owner_with_many_archives_leaves_a_thread_to_others(archives: Archives, tmp_path: Path) -> None:
    for name in ("b~1", "c~1", "other~1"):
        (tmp_path / f"checkpoints/run/weights/{name}").mkdir()
        (tmp_path / f"checkpoints/run/weights/{name}/file").write_bytes(os.urandom(20_000_000))
    names = ("a~1", "b~1", "c~1")
    asked = [asyncio.create_task(archives.get(f"checkpoints/run/weights/{name}", "alice")) for name in names]
    await begun(tmp_path)
    await archives.get("checkpoints/run/weights/other~1", "bob")
    assert not asked[1].done(), "bob waited for two of alice's"
    assert all(path.exists() for path in await asyncio.gather(*asked))


async def test_a_disk_that_fills_while_an_archive_is_packed_is_said_to_be_full(
    archives: Archives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(packing, "_pack", fill)
        with pytest.raises(DiskFull, match="the archive cannot be written: No space left on device"):
            await archives.get(DIRECTORY, "alice")
    assert (await archives.get(DIRECTORY, "alice")).exists()


async def test_no_archive_is_packed_where_the_disk_has_no_room(
    archives: Archives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=19_999_999))
    with pytest.raises(DiskFull, match="has 19999999 bytes left, and 20000000 are needed"):
        await archives.get(DIRECTORY, "alice")
    assert not packed(tmp_path)
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=20_000_000))
    assert (await archives.get(DIRECTORY, "alice")).exists()
