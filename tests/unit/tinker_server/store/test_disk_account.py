"""One account has all bytes of an owner: what was fetched goes first, then new work is refused."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.stored_runs import run_of
from tinker_server.errors import Busy, DiskFull, ResultExpired
from tinker_server.store import holdings
from tinker_server.store.client_metrics import VALUE_BYTES, ClientMetricStore
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
from tinker_server.store.disk_account import DiskAccount
from tinker_server.store.futures.fetched import LARGE_BYTES, RESENT_S
from tinker_server.store.futures.records import ImagePlace, Operation, Result
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.holdings import Holdings

KIB = 1 << 10


def account_of(db: Database, futures: FutureStore, tmp_path: Path, now: list[float]) -> DiskAccount:
    counts = [futures.rows.held_bytes, ClientMetricStore(db).held_bytes]
    held = Holdings(db, Storage(tmp_path, db), 1000, 0.5, counts)
    return DiskAccount(held, futures, lambda: now[0])


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are free on the disk. Half of an owner's bytes and these may be its own: so many."""
    free = [100 * KIB]
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    return free


async def ended(
    futures: FutureStore, number: int, result: bytes, owner: str = "alice", *, logged: bool = False
) -> tuple[str, Result]:
    operation = Operation("forward_backward", f"{owner}-model", number, b"b" * KIB, "json", owner, size_bytes=KIB)
    accepted = await futures.queue.enqueue(operation)
    futures.queue.complete(accepted.request_id, Result(result, "json"), logged=logged)
    await futures.queue.flush()
    stored = await futures.wait(accepted.request_id, owner, 1)
    assert stored is not None
    return accepted.request_id, stored


async def test_bodies_images_and_results_are_held_until_they_go(db: Database, futures: FutureStore) -> None:
    held = futures.rows.held_bytes
    assert await held("alice") == 0
    image = ImagePlace(100, 300, "digest")
    for number in range(3):  # with one image, which is stored once
        operation = Operation("forward_backward", "m", number, bytes(KIB), "json", "alice", images=(image,))
        await futures.queue.enqueue(operation)
    assert await held("alice") == 3 * (KIB - 300) + 300
    await ended(futures, 1, bytes(50), owner="bob")
    assert await held("bob") == 50, "the body is gone with its end"
    await ended(futures, 2, bytes(50), owner="bob", logged=True)
    assert await held("bob") == 50 + KIB + 50, "but not one of a log"
    assert await FutureStore(db, 0).rows.held_bytes("alice") == 3 * (KIB - 300) + 300, "nor with a restart"


async def test_fetched_results_make_room_and_those_that_were_not_stay(
    db: Database, futures: FutureStore, tmp_path: Path, free: list[int]
) -> None:
    now = [time.time()]
    account = account_of(db, futures, tmp_path, now)
    sent = [await ended(futures, number, bytes(30 * KIB)) for number in range(2)]
    kept = [await ended(futures, number, bytes(30 * KIB), logged=number == 3) for number in (2, 3)]
    with pytest.raises(Busy, match=r"results.* of alice would take 0\.000 GiB; 0\.000 GiB are allowed, 50% of"):
        await account.require_room("alice", KIB)
    for request_id, result in sent:
        await futures.note_sent(request_id, result)
    with pytest.raises(Busy):
        await account.require_room("alice", KIB)
    now[0] += RESENT_S + 1
    account._measures.clear()  # AGAIN_S has passed
    await account.require_room("alice", KIB)
    with pytest.raises(ResultExpired, match="was fetched, or kept for its time, and is gone"):
        await futures.wait(sent[0][0], "alice", 0)
    for request_id, _ in kept:
        assert await futures.wait(request_id, "alice", 0) is not None, "what nobody has fetched stays"
    assert len(await futures.rows.body(kept[1][0])) == KIB, "and so does the body in a log"
    await account.require_room("bob", 40 * KIB)


async def test_work_is_refused_before_its_results_fill_the_disk(
    db: Database, futures: FutureStore, tmp_path: Path, free: list[int]
) -> None:
    account = account_of(db, futures, tmp_path, [time.time()])
    await account.require_room("alice", KIB)
    await futures.queue.enqueue(Operation("forward", "m", 1, b"", "json", "alice", answer_bytes=99 * KIB))
    with pytest.raises(Busy, match="delete weights, unload models, or fetch results"):
        await account.require_room("alice", 2 * KIB)
    free[0] *= 2
    account._measures.clear()
    await account.require_room("alice", KIB)


async def test_a_large_result_goes_minutes_after_it_was_sent_last(db: Database, futures: FutureStore) -> None:
    large, small = [await ended(futures, n, bytes(size)) for n, size in enumerate((LARGE_BYTES + 1, LARGE_BYTES))]
    for request_id, result in (large, small):
        await futures.note_sent(request_id, result)
    now = time.time()
    await futures.expire_large(now + RESENT_S - 60)
    assert await futures.wait(large[0], "alice", 0) is not None
    again = FutureStore(db, 0)  # after a restart
    await again.expire_large(now + RESENT_S + 60)
    with pytest.raises(ResultExpired):
        await again.wait(large[0], "alice", 0)
    assert await again.wait(small[0], "alice", 0) is not None


async def test_metrics_of_a_client_count_and_are_refused_with_the_rest(
    db: Database, futures: FutureStore, tmp_path: Path, free: list[int]
) -> None:
    account, metrics = account_of(db, futures, tmp_path, [time.time()]), ClientMetricStore(db)
    runs = [await run_of(db, owner) for owner in ("alice", "alice", "bob")]
    for run in runs:
        for step in range(50):
            await account.require_room(run.owner, VALUE_BYTES)
            await metrics.put(run.model_id, step, {"reward": 1.0}, 1.0)
            account.add(run.owner, VALUE_BYTES)
    assert await metrics.held_bytes("alice") == 100 * VALUE_BYTES == 2 * await metrics.held_bytes("bob")
    free[0] = 50 * VALUE_BYTES
    account._measures.clear()
    with pytest.raises(Busy, match="metrics"):
        await account.require_room("alice", VALUE_BYTES)
    with pytest.raises(Busy):
        await account.require_room("bob", VALUE_BYTES)


async def test_a_full_disk_is_no_fault_of_an_owner_that_holds_little(
    db: Database, tmp_path: Path, free: list[int]
) -> None:
    held = Holdings(db, Storage(tmp_path, db), 1000, 0.9)
    with pytest.raises(DiskFull, match="has 102400 bytes left, and 102401 are needed"):
        await held.require_room("alice", 100 * KIB + 1)
