"""No model is lost and no file left behind when the database refuses for a while or the server crashes."""

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from tests.fakes import FakeBackend
from tinker_server.accounts import Records
from tinker_server.api_schemas.sessions import CreateSessionRequest, FinishReason, FinishSessionRequest
from tinker_server.api_schemas.training import Trainable
from tinker_server.api_schemas.weights import SaveWeightsForSamplerRequest, SaveWeightsRequest
from tinker_server.auth.keys import Keys
from tinker_server.backends.protocol import LoadedModel, SavedForm
from tinker_server.errors import DatabaseUnavailable, SessionFinished
from tinker_server.models.base_models import BaseModels
from tinker_server.models.model import Model, ModelStores, SnapshotLimits, Snapshots
from tinker_server.models.replay import LogReplay
from tinker_server.store.audit import AuditStore
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.holdings import Holdings
from tinker_server.store.records import TrainingRun, held_bytes
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.sessions import SessionStore
from tinker_server.store.usage import UsageStore
from tinker_server.weights import saving
from tinker_server.weights.lookup import WeightStores

OWNER = "alice"

R = TypeVar("R")


@dataclass
class House:
    """The stores around one model, on a database whose retries end soon."""

    data_dir: Path
    db: Database
    backend: FakeBackend
    sessions: SessionStore
    runs: RunStore
    storage: Storage
    stores: ModelStores
    weights: WeightStores
    model_id: str = ""
    model: Model = field(init=False)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the database's write lock, as another program would."""
        other = sqlite3.connect(self.data_dir / "test.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")
            other.close()

    def files(self) -> list[str]:
        return sorted(path.parent.name.partition("~")[0] for path in self.data_dir.glob("checkpoints/*/*/*/steps"))

    async def steps(self) -> int:
        """Return the trainer's steps of the model, which is brought into memory."""
        await self.model.ensure_loaded()
        return self.backend.tiny.trainer.steps[self.model_id]


def build(data_dir: Path, backend: FakeBackend) -> House:
    db = Database(f"sqlite+aiosqlite:///{data_dir / 'test.db'}", retry_s=0.5, busy_timeout_ms=50)
    runs, storage = RunStore(db), Storage(data_dir, db)
    futures = FutureStore(db, recent_bytes=0)
    bases, replay = BaseModels(backend.models), LogReplay(futures, CheckpointStore(db), storage)
    stores = ModelStores(bases, runs, futures, storage, replay, Snapshots(SnapshotLimits(600, 1 << 20, 600, 600, 600)))
    holdings = Holdings(db, storage, 1000, 1)
    keys, audit = Keys(data_dir / "keys"), AuditStore(db, Records())
    weights = WeightStores(bases, CheckpointStore(db), SamplerStore(db), storage, UsageStore(db), holdings, keys, audit)
    return House(data_dir, db, backend, SessionStore(db), runs, storage, stores, weights)


async def save(house: House, seq_id: int, path: str) -> str:
    """Save a checkpoint under a name, and return its path."""
    request = SaveWeightsRequest(model_id=house.model_id, seq_id=seq_id, path=path)
    return (await saving.save_weights(house.weights, house.model, work(house, request))).path


async def save_unnamed(house: House, seq_id: int, session_seq_id: int, kind: Literal["snapshot", "inflight"]) -> None:
    request = SaveWeightsForSamplerRequest(
        model_id=house.model_id, seq_id=seq_id, sampling_session_seq_id=session_seq_id, kind=kind
    )
    await saving.save_weights_for_sampler(house.weights, house.model, work(house, request))


def work(house: House, request: R) -> Work[R]:
    return Work(Operation("save_weights", house.model_id, 1, b"", "application/json", OWNER), request)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = build(tmp_path, FakeBackend())
    await house.db.migrate()
    session_id = await house.sessions.create(CreateSessionRequest(), None, OWNER)
    house.model_id = f"{session_id}:train:0"
    run = TrainingRun(
        model_id=house.model_id,
        owner=OWNER,
        session_id=session_id,
        model_seq_id=0,
        base_model="tiny",
        trainable=Trainable(rank=8, seed=1),
        optimizer_config={},
        status="active",
        created_at=1.0,
    )
    house.model = Model(house.model_id, house.stores)
    await house.model.create(run, None, with_optimizer=False)
    house.backend.tiny.trainer.steps[house.model_id] = 7
    yield house
    await house.db.close()


def lock_once_snapshot_is_recorded(house: House, lock: contextlib.ExitStack) -> None:
    """Lock the database from the moment that the model is on disk."""
    runs = house.runs
    set_snapshot = runs.set_snapshot

    async def locking(*values: Any) -> None:
        await set_snapshot(*values)
        runs.set_snapshot = set_snapshot  # type: ignore[method-assign]
        lock.enter_context(house.locked())

    runs.set_snapshot = locking  # type: ignore[method-assign, assignment]


async def test_a_model_is_restored_if_its_suspension_could_not_be_recorded(house: House) -> None:
    with contextlib.ExitStack() as lock:
        lock_once_snapshot_is_recorded(house, lock)
        with pytest.raises(DatabaseUnavailable):
            await house.model.suspend()
    await house.model.unload()
    assert await house.steps() == 7


async def test_the_next_sweep_completes_a_suspension(house: House) -> None:
    with contextlib.ExitStack() as lock:
        lock_once_snapshot_is_recorded(house, lock)
        with pytest.raises(DatabaseUnavailable):
            await house.model.suspend()
    await house.model.suspend()
    assert (await house.runs.get(house.model_id)).status == "suspended"
    assert await house.steps() == 7


async def test_a_crash_before_a_suspension_is_recorded_loses_nothing(house: House) -> None:
    with contextlib.ExitStack() as lock:
        lock_once_snapshot_is_recorded(house, lock)
        with pytest.raises(DatabaseUnavailable):
            await house.model.suspend()
    next_server = build(house.data_dir, FakeBackend())
    next_server.model_id = house.model_id
    next_server.model = Model(house.model_id, next_server.stores)
    await next_server.runs.mark_all_suspended()
    await next_server.storage.delete_half_written()
    assert await next_server.steps() == 7
    await next_server.db.close()


async def test_a_model_stays_in_memory_if_its_suspension_cannot_begin(house: House) -> None:
    with house.locked(), pytest.raises(DatabaseUnavailable):
        await house.model.suspend()
    assert house.backend.tiny.trainer.steps[house.model_id] == 7
    assert await house.steps() == 7 and house.files() == []


async def test_a_short_lock_does_not_fail_a_save(house: House) -> None:
    with contextlib.ExitStack() as lock:
        lock.enter_context(house.locked())
        asyncio.get_running_loop().call_later(0.2, lock.close)
        saved = await save(house, 1, "a")
    assert saved.endswith("/weights/a") and house.files() == ["a"]


@pytest.mark.parametrize("named", [True, False])
async def test_a_long_lock_fails_a_save_and_leaves_no_files(house: House, named: bool) -> None:
    trainer, lock = house.backend.tiny.trainer, contextlib.ExitStack()
    save_now = trainer.save

    async def locking(model: LoadedModel, directory: Path, form: SavedForm) -> None:
        await save_now(model, directory, form)
        lock.enter_context(house.locked())

    trainer.save = locking  # type: ignore[method-assign]
    with lock, pytest.raises(DatabaseUnavailable) as caught:
        if named:
            await save(house, 1, "a")
        else:
            await save_unnamed(house, 1, 0, "snapshot")
    assert "locked" not in str(caught.value) and "SELECT" not in str(caught.value)
    await house.storage.delete_unreferenced(math.inf)
    assert house.files() == []


@pytest.mark.parametrize("set_back_s", [0, 3600])
async def test_files_that_a_crash_left_half_written_are_deleted_by_the_next_server(
    house: House, set_back_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock is set back in between."""
    saved = await save(house, 1, "kept")
    later = time.time() + set_back_s
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: later)
        reserved = await house.storage.reserve(house.model_id, "weights", "unrecorded")
    (house.data_dir / reserved).mkdir(parents=True)
    (house.data_dir / reserved / "steps").write_text("1")
    half = house.data_dir / "checkpoints" / house.model_id / "weights" / ".half~1.abc"
    half.mkdir()
    (half / "steps").write_text("1")
    next_server = build(house.data_dir, FakeBackend())
    await next_server.storage.delete_half_written()
    assert house.files() == ["kept"] and saved.endswith("kept") and not half.exists()
    await next_server.db.close()


async def test_replaced_inflight_weights_are_deleted_by_the_next_save_or_the_next_server(house: House) -> None:
    for number in range(4):
        await save_unnamed(house, number, number, "inflight")
    assert house.files() == ["2", "3"]
    next_server = build(house.data_dir, FakeBackend())
    await next_server.storage.delete_half_written()
    assert house.files() == ["3"]
    await next_server.db.close()


async def test_an_inflight_save_that_was_interrupted_moves_earlier_sessions_once_it_is_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_unnamed(house, 1, 1, "inflight")

    async def away(*_: object) -> None:
        raise DatabaseUnavailable("the database does not answer")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(house.weights.samplers, "repoint", away)
        with pytest.raises(DatabaseUnavailable):
            await save_unnamed(house, 2, 2, "inflight")
    await save_unnamed(house, 2, 2, "inflight")
    session_id = house.model_id.partition(":")[0]
    sessions = [await house.weights.samplers.get(f"{session_id}:sample:{number}") for number in (1, 2)]
    assert len({session.directory for session in sessions}) == 1


async def test_a_session_is_finished_once_the_database_says_so(house: House) -> None:
    session_id = house.model_id.partition(":")[0]
    finish = FinishSessionRequest(reason=FinishReason(type="success"))
    with house.locked(), pytest.raises(DatabaseUnavailable):
        await house.sessions.finish(session_id, finish, OWNER)
    await house.sessions.require(session_id, OWNER, must_be_open=True)
    await house.sessions.finish(session_id, finish, OWNER)
    for store in (house.sessions, SessionStore(house.db)):
        with pytest.raises(SessionFinished):
            await store.require(session_id, OWNER, must_be_open=True)


async def test_cached_sessions_are_bounded_by_their_bytes_and_all_can_be_found(house: House) -> None:
    small = await SessionStore(house.db).create(CreateSessionRequest(), None, OWNER)
    one_bytes = held_bytes(await house.sessions.get(small))
    store = SessionStore(house.db, cached_bytes=5 * one_bytes + one_bytes // 2)
    names = [await store.create(CreateSessionRequest(), None, OWNER) for _ in range(20)]
    assert len(store._cached) == 5
    large = CreateSessionRequest(user_metadata={"noted": "x" * 2 * one_bytes})
    names.append(await store.create(large, None, OWNER))
    assert 1 < len(store._cached) < 5, "they are counted, not weighed"
    for name in names:
        await store.require(name, OWNER, must_be_open=True)
