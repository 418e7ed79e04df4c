"""Weights are packed as one file."""

import asyncio
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
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
    archives = Archives(storage)
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


@pytest.mark.flaky(reruns=2)
async def test_an_archive_is_packed_once_for_all_who_ask_and_other_threads_stay_free(
    archives: Archives, tmp_path: Path
) -> None:
    asked = [asyncio.create_task(archives.get(DIRECTORY)) for _ in range(50)]
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
    first, second = (asyncio.create_task(archives.get(DIRECTORY)) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    assert (await second).exists()


async def test_no_archive_stays_of_weights_that_were_deleted_meanwhile(
    archives: Archives, storage: Storage, tmp_path: Path
) -> None:
    asked = asyncio.create_task(archives.get(DIRECTORY))
    await begun(tmp_path)
    await storage.delete(DIRECTORY)
    with pytest.raises(FileNotFoundError):
        await asked
    assert not packed(tmp_path)
