"""Sampler weights without a name are deleted beyond their limits, unless they are in use."""

import asyncio
import time

import pytest
from sqlalchemy import insert, update

from tests.stalls import longest_stall
from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.store.database import Database
from tinker_server.store.records import SamplingSession
from tinker_server.store.samplers import IN_USE_S, SamplerStore, UnnamedLimits
from tinker_server.store.sessions import SessionStore
from tinker_server.store.tables import SamplingSessionRow, SessionRow

HOUR_S = 3600.0
LIMITS = UnnamedLimits(kept_s=6 * HOUR_S, silent_s=24 * HOUR_S, per_model=3, bytes_per_owner=1000)
NOW = 1e9


async def session(db: Database) -> str:
    return await SessionStore(db).create(CreateSessionRequest(), None, "alice")


def sampler(session_id: str, number: int, *, made_at: float, size_bytes: int = 1, model: str = "a") -> SamplingSession:
    return SamplingSession(
        sampling_session_id=f"{session_id}:sample:{number}",
        owner="alice",
        session_id=session_id,
        base_model="tiny",
        directory=f"checkpoints/{model}/snapshot/{number}",
        size_bytes=size_bytes,
        created_at=made_at,
    )


async def test_the_latest_used_of_a_model_are_kept_and_those_in_use_in_any_case(db: Database) -> None:
    session_id, store, now = await session(db), SamplerStore(db), time.time()
    for number in range(8):
        await store.create(sampler(session_id, number, made_at=now - HOUR_S - number))
    await store.create(sampler(session_id, 8, made_at=now - HOUR_S - 99, model="b"))
    with store.using(f"{session_id}:sample:7"):
        pass
    with store.using(f"{session_id}:sample:6"):
        gone = await store.take_unused(LIMITS, now + HOUR_S)
    # 6 is running; 7 was used an hour ago, which is the latest of the others
    assert sorted(gone) == [f"checkpoints/a/snapshot/{number}" for number in (1, 2, 3, 4, 5)]
    assert await store.take_unused(LIMITS, now + HOUR_S) == []
    assert (await store.get(f"{session_id}:sample:3")).weights_deleted_at == now + HOUR_S
    for number in range(20, 30):
        await store.create(sampler(session_id, number, made_at=now + HOUR_S - IN_USE_S / 2))
    gone = await store.take_unused(LIMITS, now + HOUR_S)
    assert not [name for name in gone if int(name.rpartition("/")[2]) >= 20], "they are in use"


async def test_the_bytes_of_an_owner_are_bounded_over_all_models(db: Database) -> None:
    session_id, store, now = await session(db), SamplerStore(db), time.time()
    for number in range(4):
        await store.create(
            sampler(session_id, number, made_at=now - number - HOUR_S, size_bytes=400, model=f"m{number}")
        )
    assert sorted(await store.take_unused(LIMITS, now)) == ["checkpoints/m2/snapshot/2", "checkpoints/m3/snapshot/3"]


async def test_weights_that_were_used_before_a_restart_are_kept_after_it(db: Database) -> None:
    session_id, now = await session(db), time.time()
    before = SamplerStore(db)
    for number in range(2):
        await before.create(sampler(session_id, number, made_at=now - 7 * HOUR_S))
    with before.using(f"{session_id}:sample:0"):
        pass
    await before.save_uses()
    assert await SamplerStore(db).take_unused(LIMITS, now + 1) == ["checkpoints/a/snapshot/1"]


async def test_weights_are_kept_that_a_client_without_heartbeats_samples_from(db: Database) -> None:
    session_id, store, now = await session(db), SamplerStore(db), time.time()
    heard = now - LIMITS.silent_s - HOUR_S
    for number in range(2):
        await store.create(sampler(session_id, number, made_at=heard))
    aged = update(SessionRow).values(created_at=heard, last_heartbeat=heard)
    await db.change(lambda session: session.execute(aged))
    with store.using(f"{session_id}:sample:0"):
        pass
    assert await store.take_unused(LIMITS, now + 1) == ["checkpoints/a/snapshot/1"]


async def test_sessions_whose_weights_were_deleted_follow_the_next_save(db: Database) -> None:
    session_id, store, now = await session(db), SamplerStore(db), time.time()
    sampler_id = await store.create(sampler(session_id, 0, made_at=now - 7 * HOUR_S))
    assert await store.take_unused(LIMITS, now) == ["checkpoints/a/snapshot/0"]
    assert (await store.get(sampler_id)).weights_deleted_at == now
    await store.repoint("checkpoints/a/snapshot/", "checkpoints/a/snapshot/1")
    for reader in (store, SamplerStore(db)):  # the second has nothing in its cache
        moved = await reader.get(sampler_id)
        assert moved.directory == "checkpoints/a/snapshot/1" and moved.weights_deleted_at is None


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_thousands_of_unused_weights_do_not_stall_the_server(db: Database) -> None:
    session_id, number = await session(db), 10_000
    row = {"owner": "alice", "session_id": session_id, "base_model": "tiny", "created_at": 1.0}
    rows = [
        row | {"sampling_session_id": f"{session_id}:sample:{i}", "directory": f"checkpoints/a/snapshot/{i}"}
        for i in range(number)
    ]
    async with db.write() as writing:
        await writing.execute(insert(SamplingSessionRow), rows)
    store = SamplerStore(db)
    async with longest_stall() as stall:
        gone = await asyncio.wait_for(store.take_unused(LIMITS, time.time()), 60)
    assert len(gone) == number
    assert stall.seconds < 0.5, stall
