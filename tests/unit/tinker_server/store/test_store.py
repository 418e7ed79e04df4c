"""The store on a migrated database: SQLite in a file, and the PostgreSQL that TEST_DATABASE_URL names."""

import asyncio
import re
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, Pool, event, text

from tinker_server import accounts
from tinker_server.api_schemas.sessions import (
    CreateSessionRequest,
    FinishReason,
    FinishSessionRequest,
    SearchSessionsRequest,
)
from tinker_server.api_schemas.training import Trainable
from tinker_server.api_schemas.weights import TinkerPath
from tinker_server.backends.files import make_directory
from tinker_server.backends.protocol import OwnLayout
from tinker_server.errors import (
    BadRequest,
    Busy,
    HeartbeatEnded,
    ModelIdTaken,
    ResultExpired,
    SequenceConflict,
    SessionFinished,
    StartFailed,
    UnknownCheckpoint,
    UnknownFuture,
    UnknownModel,
    UnknownSession,
)
from tinker_server.store import database
from tinker_server.store.catalog import Catalog, Page, Scope
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage, hold
from tinker_server.store.futures.records import Accepted, Operation, Result
from tinker_server.store.futures.store import TOMBSTONES_KEPT_S, FutureStore
from tinker_server.store.own_layout import bases_of_own_layout
from tinker_server.store.records import Checkpoint, SamplingSession, TrainingRun
from tinker_server.store.run_search import MAX_WORDS, words_of
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.sessions import SessionStore
from tinker_server.store.tables import Table

OWNER = "alice"


def step(seq_id: int, lane: str = "model", kind: str = "optim_step", digest: str = "one") -> Operation:
    return Operation(kind, lane, seq_id, b'{"a":1}', "application/json", OWNER, digest, 7)


def done(text: str = "{}", failed: bool = False) -> Result:
    return Result(text.encode(), "application/json", failed)


async def test_the_migrations_make_the_tables_that_the_code_declares(db: Database) -> None:
    async with db.read() as session:
        connection = await session.connection()
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), Table.metadata)
        )
    assert differences == []


async def accept(futures: FutureStore, operation: Operation) -> str:
    return (await futures.queue.enqueue(operation)).request_id


async def test_the_same_number_again_gives_the_first_request_id(futures: FutureStore) -> None:
    first = step(1)
    assert await futures.queue.enqueue(first) == Accepted(first.request_id, is_new=True)
    repeat = Accepted(first.request_id, is_new=False)
    assert await futures.queue.enqueue(step(1)) == repeat
    futures.queue.complete(first.request_id, done())
    assert await futures.wait(first.request_id, OWNER, 5) is not None
    assert await futures.queue.enqueue(step(1)) == repeat


async def test_retries_in_one_commit_agree_on_one_request_id(futures: FutureStore) -> None:
    accepted = await asyncio.gather(*(futures.queue.enqueue(step(seq_id)) for seq_id in [1, 2, 1, 1, 2]))
    ids = [one.request_id for one in accepted]
    assert ids[0] == ids[2] == ids[3] and ids[1] == ids[4] and ids[0] != ids[1]
    assert [one.is_new for one in accepted] == [True, True, False, False, False]


async def test_another_operation_under_a_used_number_is_refused_and_harms_no_other(futures: FutureStore) -> None:
    await futures.queue.enqueue(step(1))
    outcomes = await asyncio.gather(
        futures.queue.enqueue(step(1, kind="save_weights")),
        futures.queue.enqueue(step(1, digest="another")),
        futures.queue.enqueue(step(2)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [SequenceConflict, SequenceConflict, Accepted]


async def test_submits_that_arrive_together_take_as_many_statements_as_two(futures: FutureStore) -> None:
    counts: list[int] = []

    def note(*_: object) -> None:
        counts[-1] += 1

    event.listen(Engine, "before_cursor_execute", note)
    try:
        for first, number in ((0, 2), (100, 50)):
            counts.append(0)
            await asyncio.gather(*(futures.queue.enqueue(step(first + place)) for place in range(number)))
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert counts[0] == counts[1], counts


async def test_numbers_have_64_bits(futures: FutureStore) -> None:
    work = step(10**18)
    assert await accept(futures, work) == work.request_id
    with pytest.raises(BadRequest):
        await futures.queue.enqueue(step(2**63))


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_a_held_wait_ends_as_soon_as_the_result_is_there(futures: FutureStore) -> None:
    request_id = await accept(futures, step(1))
    waits = [asyncio.create_task(futures.wait(request_id, OWNER, 30)) for _ in range(2)]
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    futures.queue.complete(request_id, done('{"x":1}'))
    for result in await asyncio.gather(*waits):
        assert result is not None and result.body == b'{"x":1}'
    assert time.perf_counter() - started < 0.5


async def test_a_wait_without_a_result_ends_with_none(futures: FutureStore) -> None:
    assert await futures.wait(await accept(futures, step(1)), OWNER, 0.02) is None


async def test_an_unknown_request_id_is_refused(futures: FutureStore) -> None:
    with pytest.raises(UnknownFuture):
        await futures.wait("nothing", OWNER, 1)


async def test_results_too_large_for_memory_come_from_the_database(futures: FutureStore) -> None:
    request_id = await accept(futures, step(1))
    futures.queue.complete(request_id, Result(b"x" * 5000, "application/x-protobuf"))
    result = await futures.wait(request_id, OWNER, 5)
    assert result is not None and result.body == b"x" * 5000 and result.content_type == "application/x-protobuf"


async def test_expired_results_leave_a_tombstone(futures: FutureStore) -> None:
    request_id = await accept(futures, step(1))
    futures.queue.complete(request_id, done())
    await futures.wait(request_id, OWNER, 5)
    await futures.expire(time.time() + 1)
    with pytest.raises(ResultExpired):
        await futures.wait(request_id, OWNER, 1)


async def test_a_new_store_finds_unfinished_operations_and_results(db: Database) -> None:
    first = FutureStore(db, recent_bytes=0)
    await first.start()
    left, finished = step(1), step(2)
    for work in (left, finished):
        await first.queue.enqueue(work)
    first.queue.complete(finished.request_id, done("no", failed=True))
    await first.stop()
    second = FutureStore(db, recent_bytes=0)
    (found,) = await second.start()
    assert found == replace(left, body=None, tries=0) and type(found.size_bytes) is int
    assert await second.rows.body(left.request_id) == left.body
    result = await second.wait(finished.request_id, OWNER, 1)
    assert result is not None and result.body == b"no" and result.failed
    assert await second.wait(left.request_id, OWNER, 0.01) is None
    await second.stop()


async def test_a_poll_reads_no_body_and_a_cancellation_no_result_either(futures: FutureStore) -> None:
    request_id = await accept(futures, step(1))
    futures.queue.complete(request_id, done("result"))
    await futures.queue.flush()
    futures._recent.keep(lambda _: False)  # as after a restart
    read: list[str] = []

    def note(_: Connection, __: object, statement: str, *___: object) -> None:
        read.append(statement.partition("FROM")[0])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        polled = await futures.wait(request_id, OWNER, 30)
        of_poll = read.copy()
        await futures.require_finished_sample(request_id, OWNER)
        with pytest.raises(UnknownFuture):
            await futures.require_finished_sample(request_id, "bob")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert polled is not None and polled.body == b"result"
    assert of_poll and not [one for one in read if re.search(r"futures\.request\b", one)]
    later = read[len(of_poll) :]
    assert later and not [one for one in later if re.search(r"futures\.result\b", one)]


async def test_a_thousand_futures_at_once_cost_a_few_commits(futures: FutureStore) -> None:
    async def one(seq_id: int) -> None:
        request_id = await accept(futures, step(seq_id))
        futures.queue.complete(request_id, done())
        assert await futures.wait(request_id, OWNER, 30) is not None

    commits: list[Connection] = []
    note = commits.append
    event.listen(Engine, "commit", note)
    try:
        await asyncio.gather(*map(one, range(1000)))
    finally:
        event.remove(Engine, "commit", note)
    assert 0 < len(commits) < 50  # so that they pass in less than a second on an idle machine


async def test_the_database_file_shrinks_when_results_have_expired(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    db = Database(f"sqlite+aiosqlite:///{file}")
    await db.migrate()
    futures = FutureStore(db, recent_bytes=0)
    await futures.start()

    def size() -> int:
        return sum(path.stat().st_size for path in tmp_path.iterdir())

    await futures.expire(0)
    empty = size()
    for number in range(20):
        futures.queue.complete(await accept(futures, step(number)), done("x" * 500_000))
    await futures.expire(0)
    assert size() > empty + 9_000_000
    await futures.expire(time.time() + 1)
    assert size() < empty + 100_000
    with pytest.raises(ResultExpired):
        request_id = await accept(futures, step(0))
        await futures.wait(request_id, OWNER, 1)
    await futures.expire(time.time() + TOMBSTONES_KEPT_S + 1)
    with pytest.raises(UnknownFuture):
        await futures.wait(request_id, OWNER, 1)
    await futures.stop()
    await db.close()


async def test_a_session_lives_until_it_is_finished(db: Database) -> None:
    store = SessionStore(db)
    session_id = await store.create(CreateSessionRequest(tags=["a"]), "key", OWNER)
    assert await store.create(CreateSessionRequest(tags=["a"]), "key", OWNER) == session_id
    assert await store.create(CreateSessionRequest(), None, OWNER) != session_id
    await store.heartbeat(session_id, OWNER)
    await store.save_heartbeats()
    await store.require(session_id, OWNER, must_be_open=True)
    await store.finish(session_id, FinishSessionRequest(reason=FinishReason(type="errored"), detail="d"), OWNER)
    await store.finish(session_id, FinishSessionRequest(reason=FinishReason(type="success")), OWNER)
    again = SessionStore(db)
    with pytest.raises(HeartbeatEnded):
        await again.heartbeat(session_id, OWNER)
    with pytest.raises(SessionFinished):
        await again.require(session_id, OWNER, must_be_open=True)
    with pytest.raises(UnknownSession):
        await again.heartbeat("other", OWNER)


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ({"display_name": "ÉLAN"}, ["Élan Vital"]),
        ({"display_name": "vital élan"}, ["Élan Vital"]),
        ({"display_name": "100%"}, ["100% of_it"]),
        ({"display_name": "1_0"}, []),
        ({"user_metadata": {"größe": "fünf"}}, ["Élan Vital"]),
        ({"user_metadata": {"n": "5"}}, ["100% of_it"]),
        ({"user_metadata": {"n": "5", "on": "True"}}, ["100% of_it"]),
        ({"user_metadata": {"n": "six"}}, []),
        ({"project_ids": ["default"]}, ["100% of_it"]),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, ["Élan Vital"]),
    ],
)
async def test_a_search_finds_the_same_on_every_database(
    db: Database, search: dict[str, Any], found: list[str]
) -> None:
    store = SessionStore(db)
    first = CreateSessionRequest(display_name="Élan Vital", project_id="p", user_metadata={"größe": "fünf"})
    finished = await store.create(first, None, OWNER)
    await store.create(CreateSessionRequest(display_name="100% of_it", user_metadata={"n": 5, "on": True}), None, OWNER)
    await store.finish(finished, FinishSessionRequest(reason=FinishReason(type="success")), OWNER)
    records, has_more = await Catalog(db).search(SearchSessionsRequest.model_validate(search), OWNER, time.time())
    assert [record.session.display_name for record in records] == found and not has_more


async def test_a_cursor_tells_nothing_of_another_owners_session(db: Database) -> None:
    store = SessionStore(db)
    await store.create(CreateSessionRequest(display_name="mine"), None, OWNER)
    others = await store.create(CreateSessionRequest(display_name="theirs, which is newer"), None, "another")
    for session_id in (others, "there-is-none"):
        cursor = {"last_created_at": "2000-01-01T00:00:00Z", "last_session_id": session_id}
        search = SearchSessionsRequest.model_validate({"cursor": cursor})
        assert await Catalog(db).search(search, OWNER, time.time()) == ([], False)


def run(session_id: str, number: int = 0) -> TrainingRun:
    return TrainingRun(
        owner=OWNER,
        model_id=f"{session_id}:train:{number}",
        session_id=session_id,
        model_seq_id=number,
        base_model="tiny",
        trainable=Trainable(rank=8, seed=2**62, train_attn=False),
        user_metadata={"k": "v"},
        optimizer_config={"type": "adamw"},
        status="active",
        created_at=1.0,
    )


async def test_runs_are_on_disk_after_a_restart_and_still_known(db: Database) -> None:
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, OWNER)
    await RunStore(db).add(run(session_id))
    store = RunStore(db)
    await store.mark_all_suspended()
    found = await store.require(f"{session_id}:train:0", OWNER)
    assert (found.status, found.trainable.seed, found.trainable.train_attn) == ("suspended", 2**62, False)
    with pytest.raises(UnknownModel):
        await store.require("other", OWNER)


async def test_a_search_looks_for_each_word_once_and_for_a_bounded_number(db: Database) -> None:
    session_id = await SessionStore(db).create(CreateSessionRequest(display_name="A b"), None, OWNER)
    statements: list[str] = []

    def note(_: Connection, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        search = SearchSessionsRequest(display_name="a " * 60 + "A " * 60 + "b")
        records, _ = await Catalog(db).search(search, OWNER, time.time())
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert [one.session.session_id for one in records] == [session_id]
    assert max(one.count("lower(sessions.display_name)") for one in statements) == 2
    many = " ".join(map(str, range(MAX_WORDS + 1)))
    with pytest.raises(BadRequest, match=f"display_name: {MAX_WORDS + 1} different words .* {MAX_WORDS} are allowed"):
        await Catalog(db).search(SearchSessionsRequest(display_name=many), OWNER, time.time())
    with pytest.raises(BadRequest, match=f"q: {MAX_WORDS + 1} different words"):
        words_of("q", many)
    assert words_of("q", "Key=1 key=1 Key=1") == ["Key=1", "key=1"]


async def test_lists_and_searches_of_an_owner_leave_connections_to_others(db: Database) -> None:
    await SessionStore(db).create(CreateSessionRequest(display_name="a"), None, OWNER)
    out = most = 0

    def taken(*_: object) -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)

    def given_back(*_: object) -> None:
        nonlocal out
        out -= 1

    catalog, page = Catalog(db), Page(Scope(OWNER), 10, 0)
    event.listen(Pool, "checkout", taken)
    event.listen(Pool, "checkin", given_back)
    try:
        searches = [catalog.search(SearchSessionsRequest(display_name="a"), OWNER, 1.0) for _ in range(20)]
        lists = [catalog.sessions(page), catalog.runs(page, 1.0), catalog.checkpoints(page, ["weights"], 1.0)]
        found = await asyncio.gather(*searches)
        await asyncio.gather(*lists, *[catalog.storage(OWNER, None, 1.0) for _ in range(20)])
    finally:
        event.remove(Pool, "checkout", taken)
        event.remove(Pool, "checkin", given_back)
    assert all(len(records) == 1 for records, _ in found)
    assert most == database.LISTS_OF_OWNER


async def test_owners_share_the_connections_for_lists_and_wait_for_a_time(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as held:
        for number in range(database.LISTS_OF_ALL - 1):
            await held.enter_async_context(db.read_of(f"owner {number // database.LISTS_OF_OWNER}"))
        first = Page(Scope("owner 0"), 10, 0)
        waiting = asyncio.create_task(Catalog(db).sessions(first))
        assert await Catalog(db).sessions(Page(Scope("another"), 10, 0)) == []
        assert not waiting.done()
        monkeypatch.setattr(accounts, "WAIT_S", 0.01)
        with pytest.raises(Busy, match="2 of an owner and 8 of all owners are read at once"):
            await Catalog(db).sessions(first)
        async with db.read_of("another"):
            with pytest.raises(Busy):
                await Catalog(db).sessions(Page(Scope("a third"), 10, 0))
            await SessionStore(db).create(CreateSessionRequest(), None, "a third")
    assert await waiting == []


def checkpoint(directory: str, expires_at: float | None = None) -> Checkpoint:
    return Checkpoint(
        owner=OWNER,
        tinker_path="tinker://run/weights/a",
        run_id="run",
        kind="weights",
        name="a",
        directory=directory,
        base_model="tiny",
        trainable=Trainable(rank=8, seed=1),
        size_bytes=2**40,
        created_at=1.0,
        expires_at=expires_at,
    )


async def test_a_checkpoint_is_replaced_expires_and_is_deleted(db: Database) -> None:
    store, path = CheckpointStore(db), TinkerPath("run", "weights", "a")
    await store.put(checkpoint("first"))
    await store.put(checkpoint("second", expires_at=100))
    assert (await store.require(path, OWNER, now=99)).directory == "second"
    with pytest.raises(UnknownCheckpoint):
        await store.require(path, OWNER, now=100)
    assert await store.take_expired(99) == []
    assert await store.take_expired(100) == ["second"]
    assert await store.find(path) is None


async def test_bases_are_known_whose_runs_or_weights_have_the_own_layout(db: Database) -> None:
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, OWNER)
    runs, shared = RunStore(db), Trainable(rank=8, seed=1, layout="service")

    async def own_layout() -> OwnLayout:
        async with db.read() as session:
            return await bases_of_own_layout(session)

    own = shared.model_copy(update={"layout": "own"})
    kinds = {
        "shared": shared,
        "no experts": own.model_copy(update={"train_mlp": False}),
        "no attention": own.model_copy(update={"train_attn": False}),
        "ended": own,
        "own": own,
    }
    for number, (base, trainable) in enumerate(kinds.items()):
        status = "lost" if base == "ended" else "suspended"
        await runs.add(replace(run(session_id, number), base_model=base, trainable=trainable, status=status))
    assert await own_layout() == OwnLayout({"own", "no attention"}, {"own", "no experts"})
    unnamed = SamplingSession(
        sampling_session_id=f"{session_id}:sample:0",
        owner=OWNER,
        session_id=session_id,
        base_model="ended",
        directory="weights",
        created_at=1.0,
    )
    deleted = replace(unnamed, sampling_session_id=f"{session_id}:sample:1", model_path="tinker://deleted/weights/1")
    await SamplerStore(db).create(deleted)
    assert await own_layout() == OwnLayout({"own", "no attention"}, {"own", "no experts"})
    await SamplerStore(db).create(unnamed)
    assert await own_layout() == OwnLayout({"own", "no attention", "ended"}, {"own", "no experts", "ended"})
    await db.change(lambda session: session.execute(text("UPDATE sampling_sessions SET weights_deleted_at = 1")))
    await CheckpointStore(db).put(replace(checkpoint("saved"), base_model="saved", trainable=own))
    await db.change(lambda session: session.execute(text("UPDATE training_runs SET trainable = '{\"rank\": 8}'")))
    all_of_them = {"saved", "own", "shared", "no experts", "no attention"}  # as older servers wrote them
    assert await own_layout() == OwnLayout(all_of_them, all_of_them)


async def test_a_sampling_session_is_made_once(db: Database) -> None:
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, OWNER)

    def sampler(base_model: str) -> SamplingSession:
        return SamplingSession(
            owner=OWNER,
            sampling_session_id=f"{session_id}:sample:0",
            session_id=session_id,
            base_model=base_model,
            created_at=1,
        )

    store = SamplerStore(db)
    assert await store.create(sampler("tiny")) == await store.create(sampler("tiny"))
    with pytest.raises(BadRequest):
        await store.create(sampler("other"))
    assert (await SamplerStore(db).require(f"{session_id}:sample:0", OWNER)).base_model == "tiny"


async def test_a_sampling_session_never_stands_for_other_weights(db: Database) -> None:
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, OWNER)

    def sampler(number: int, directory: str | None, model_path: str | None = None) -> SamplingSession:
        return SamplingSession(
            sampling_session_id=f"{session_id}:sample:{number}",
            owner=OWNER,
            session_id=session_id,
            base_model="tiny",
            model_path=model_path,
            directory=directory,
            created_at=1,
        )

    store = SamplerStore(db)
    await store.create(sampler(0, None))
    await store.create(sampler(1, "checkpoints/a"))
    for number, directory in ((0, "checkpoints/a"), (1, "checkpoints/b"), (1, None)):
        with pytest.raises(BadRequest, match="for other weights"):
            await store.create(sampler(number, directory))
    path = "tinker://run/sampler_weights/a"
    await store.create(sampler(2, "checkpoints/first", path))
    await store.create(sampler(2, "checkpoints/saved-again", path))  # the same name


async def test_a_model_id_has_one_model_or_copy(db: Database) -> None:
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, OWNER)
    store = RunStore(db)
    await store.add(run(session_id))
    with pytest.raises(ModelIdTaken, match="take another model_seq_id"):
        await store.add(run(session_id), checkpoint("copy"))
    assert await CheckpointStore(db).find(TinkerPath("run", "weights", "a")) is None


async def test_what_has_ended_leaves_the_memory_a_while_later(db: Database) -> None:
    sessions, runs = SessionStore(db), RunStore(db)
    request = CreateSessionRequest()
    kept, ended = [await sessions.create(request, None, OWNER) for _ in range(2)]
    for session_id in (kept, ended):
        await runs.add(run(session_id))
    await sessions.finish(ended, FinishSessionRequest(reason=FinishReason(type="success")), OWNER)
    await runs.mark_lost(f"{ended}:train:0")
    sessions.forget_ended()
    runs.forget_ended()
    assert len(sessions._cached) == len(runs._cached) == 2  # a reader may still have an older record
    sessions.forget_ended(for_s=0)
    runs.forget_ended()
    assert len(sessions._cached) == len(runs._cached) == 1
    assert (await sessions.get(ended)).finished_at is not None
    assert (await runs.get(f"{ended}:train:0")).status == "lost"


async def test_directories_are_never_used_twice_and_stay_inside(db: Database, tmp_path: Path) -> None:
    storage = Storage(tmp_path, db)
    name = ("s:train:0", "weights", "a")
    async with storage.writing(*name) as first, storage.writing(*name) as second:
        assert first != second and first.startswith("checkpoints/s:train:0/weights/a~")
    for part in ("..", "a/b", "", ".hidden", "/etc"):
        with pytest.raises(ValueError, match="cannot be part of a directory"):
            async with storage.writing(part, "weights", "a"):
                pass


async def test_deleted_weights_leave_no_empty_folders_and_others_where_they_are(db: Database, tmp_path: Path) -> None:
    storage = Storage(tmp_path, db)
    kept: list[str] = []
    for run_id, kind in (("alone", "weights"), ("with another kind", "weights"), ("with another kind", "snapshots")):
        async with storage.writing(run_id.replace(" ", "-"), kind, "a") as directory:
            make_directory(storage.path(directory))
            kept.append(directory)
    await storage.delete(*kept[:2])
    assert {str(one.relative_to(tmp_path)) for one in (tmp_path / "checkpoints").rglob("*")} == {
        "checkpoints/with-another-kind",
        "checkpoints/with-another-kind/snapshots",
        kept[2],
    }
    (tmp_path / "checkpoints/of-an-earlier-server/weights").mkdir(parents=True)
    await storage.delete_half_written()  # the third too, which no row references
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_data_directory_has_one_server(tmp_path: Path) -> None:
    with hold(tmp_path / "data"), pytest.raises(StartFailed, match="another server"), hold(tmp_path / "data"):
        pass
    with hold(tmp_path / "data"):
        pass
    (tmp_path / "data").chmod(0o755)
    with hold(tmp_path / "data"):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("name", "text"), [("file", "file is not a database"), ("file/test.db", "File exists")])
async def test_an_unusable_database_is_one_clear_line(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database" * 1000)
    db = Database(f"sqlite+aiosqlite:///{tmp_path / name}")
    with pytest.raises(StartFailed) as caught:
        await db.migrate()
    assert text in str(caught.value) and "\n" not in str(caught.value)
    await db.close()
