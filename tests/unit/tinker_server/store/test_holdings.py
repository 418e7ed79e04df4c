"""An owner's holdings are counted whole, are bounded, and do not affect another owner."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import delete

from tests.stored_runs import TRAINABLE, run_of
from tinker_server.errors import LimitReached
from tinker_server.store import holdings
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.store.records import Checkpoint, SamplingSession, Snapshot
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.tables import SamplingSessionRow


async def test_models_count_while_they_are_made_and_until_they_are_unloaded(db: Database, tmp_path: Path) -> None:
    held = Holdings(db, Storage(tmp_path, db), 3, 0.9)
    first, second = await run_of(db, "alice"), await run_of(db, "alice")
    await RunStore(db).mark_suspended(second.model_id)
    async with held.model("alice", "third"):
        with pytest.raises(LimitReached, match="3 models of alice are in memory or on disk; 3 are allowed"):
            async with held.model("alice", "fourth"):
                pass
        async with held.model("bob", "bobs"):
            pass
        await RunStore(db).mark_lost(first.model_id)
        async with held.model("alice", "fourth"):
            pass
    async with held.model("alice", "fourth"), held.model("alice", second.model_id):
        pass  # what is not stored in the end is not counted, and what is stored already counts once


@pytest.fixture
async def storage(db: Database, tmp_path: Path) -> Storage:
    """Make 400 bytes of alice named, 300 unnamed in two sessions, 200 of a snapshot, 100 of an archive."""
    storage, run = Storage(tmp_path, db), await run_of(db, "alice")
    named, unnamed, snapshot = (f"checkpoints/{run.model_id}/{one}" for one in ("weights/a~1", "snapshot/0~1", "s/m~1"))
    for directory, size_bytes in ((named, 400), (unnamed, 300), (snapshot, 200)):
        storage.path(directory).mkdir(parents=True)
        (storage.path(directory) / "file").write_bytes(bytes(size_bytes))
    storage.archive_of(named).parent.mkdir()
    storage.archive_of(named).write_bytes(bytes(100))
    await RunStore(db).set_snapshot(run.model_id, Snapshot(snapshot, 0, run.trainable), {})
    await CheckpointStore(db).put(
        Checkpoint(
            tinker_path=f"tinker://{run.model_id}/weights/a",
            owner="alice",
            run_id=run.model_id,
            kind="weights",
            name="a",
            directory=named,
            base_model="tiny",
            trainable=TRAINABLE,
            size_bytes=400,
            created_at=1.0,
        )
    )
    for number in range(2):
        await SamplerStore(db).create(
            SamplingSession(
                sampling_session_id=f"{run.session_id}:sample:{number}",
                owner="alice",
                session_id=run.session_id,
                base_model="tiny",
                directory=unnamed,
                size_bytes=300,
                created_at=1.0,
            )
        )
    return storage


async def most(held: Holdings, owner: str) -> int:
    """Return how many bytes more the owner may hold, found by asking."""
    low, high = -2000, 2000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            await held.require_room(owner, middle)
            low = middle
        except LimitReached:
            high = middle
    return low


async def test_every_kind_of_directory_counts_and_what_is_deleted_makes_room(
    db: Database, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Holdings(db, storage, 1000, 0.5)
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert await most(held, "alice") == 0, "half of 1000 and 1000"
    assert await most(held, "bob") == 500
    checkpoints, runs = CheckpointStore(db), RunStore(db)
    (run,) = await runs.find_active()
    path = parse_path(f"tinker://{run.model_id}/weights/a")
    with pytest.raises(LimitReached, match=r"of alice would take 0\.000 GiB; 0\.000 GiB are allowed, 50% of"):
        await held.require_room("alice", 1)
    saved = await checkpoints.find(path)
    assert saved is not None
    await held.require_room("alice", 500, replaced=saved.directory)
    with pytest.raises(LimitReached):
        await held.require_room("alice", 501, replaced=saved.directory)
    await storage.delete(await checkpoints.take(path, "alice"))  # 400, and its archive of 100
    assert await most(held, "alice") == 250, "half of 500 and 1000, less 500"
    await runs.mark_lost(run.model_id)  # 200
    assert await most(held, "alice") == 350
    await db.change(lambda session: session.execute(delete(SamplingSessionRow)))  # 300
    assert await most(held, "alice") == 500


async def test_what_is_written_counts_until_it_is_recorded(
    db: Database, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Holdings(db, storage, 1000, 0.5)
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=1250))
    for name in "bc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(150))
    async with held.weights("alice", "b") as size_bytes:
        assert size_bytes == 150
        with pytest.raises(LimitReached):  # 1300 of 1300 and 1250
            async with held.weights("alice", "c"):
                pass
        assert await most(held, "alice") == 50, "half of 1150 and 1250, less 1150"
    assert await most(held, "alice") == 125


def test_the_folder_of_archives_is_read_again_only_when_a_file_has_come_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, folder = Storage(tmp_path, Database("sqlite+aiosqlite:///")), tmp_path / "archives"
    assert storage.archive_bytes() == {}
    folder.mkdir()
    now_ns = time.time_ns()
    for number in range(5):
        (folder / f"{number}.tar.gz").write_bytes(bytes(number))
        os.utime(folder, ns=(now_ns, now_ns))  # a file system that counts seconds
        assert len(storage.archive_bytes()) == number + 1
    os.utime(folder, (1e9, 1e9))
    before = storage.archive_bytes()
    with monkeypatch.context() as patch:
        patch.delattr(os, "scandir")
        assert storage.archive_bytes() == before == {f"{number}.tar.gz": number for number in range(5)}
    (folder / "0.tar.gz").unlink()
    assert storage.archive_bytes().keys() == before.keys() - {"0.tar.gz"}
