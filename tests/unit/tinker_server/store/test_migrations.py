"""Migrations keep all values of rows of older schemas, on every database."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text

from tests.killing import run_script
from tinker_server.api_schemas.training import Trainable
from tinker_server.api_schemas.weights import TinkerPath
from tinker_server.store.catalog import Catalog, Page, Scope
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.database import Database
from tinker_server.store.records import NO_SESSION
from tinker_server.store.runs import RunStore
from tinker_server.store.usage import UsageStore

FLAGS = list(itertools.product([True, False], repeat=3))
SEEDS = [0, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 7, 8]
TRAINABLES = [
    Trainable(rank=rank, seed=seed, train_unembed=unembed, train_mlp=mlp, train_attn=attn)
    for rank, (seed, (unembed, mlp, attn)) in enumerate(zip(SEEDS, FLAGS, strict=True), start=1)
]
SESSION = {
    "session_id": "s",
    "owner": "alice",
    "tags": json.dumps(["t"]),
    "user_metadata": json.dumps({"größe": "fünf"}, ensure_ascii=False),
    "sdk_version": "0.38.0",
    "created_at": 1.5,
    "last_heartbeat": 2.5,
}


def lora_columns(trainable: Trainable) -> dict[str, Any]:
    """Return the columns that later became one value."""
    columns = trainable.model_dump(exclude_unset=True)
    return {"lora_rank": columns.pop("rank"), "lora_seed": columns.pop("seed"), **columns}


def run(number: int, trainable: Trainable) -> dict[str, Any]:
    return {
        "model_id": f"s:train:{number}",
        "owner": "alice",
        "session_id": "s",
        "model_seq_id": number,
        "base_model": "tiny",
        "user_metadata": json.dumps({"n": number}),
        "optimizer_config": json.dumps({"type": "adamw"}),
        "status": "suspended",
        "snapshot": f"checkpoints/{number}",
        "created_at": 3.25,
        **lora_columns(trainable),
    }


def checkpoint(number: int, trainable: Trainable) -> dict[str, Any]:
    return {
        "tinker_path": f"tinker://s:train:{number}/weights/a",
        "owner": "alice",
        "run_id": f"s:train:{number}",
        "kind": "weights",
        "name": "a",
        "directory": f"checkpoints/{number}/a",
        "base_model": "tiny",
        "user_metadata": None,
        "size_bytes": 2**40,
        "created_at": 4.5,
        "expires_at": None,
        "public": number % 2 == 0,
        "copied_from": None,
        **lora_columns(trainable),
    }


async def insert(db: Database, table: str, row: dict[str, Any]) -> None:
    names = ", ".join(row)
    values = ", ".join(f":{name}" for name in row)
    async with db.write() as session:
        await session.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)


KILLED = """
import asyncio, sys
from sqlalchemy import Engine, event, text
from tests.killing import kill_at_each_step
from tinker_server.store.database import Database

def migrate(step):
    event.listen(Engine, "before_cursor_execute", step)
    event.listen(Engine, "commit", step)
    asyncio.run(Database(sys.argv[1]).migrate())

async def look(number):
    db = Database(sys.argv[1])
    async with db.read() as session:
        version = await session.scalar(text("SELECT version_num FROM alembic_version"))
        assert version == "0003", f"killed before statement {number}, it has the schema {version}"
        if sys.argv[1].startswith("sqlite"):
            assert await session.scalar(text("PRAGMA integrity_check")) == "ok"
    await db.close()

kill_at_each_step(migrate, lambda number: asyncio.run(look(number)), every=7)
"""


@pytest.fixture
async def old(database_url: str) -> AsyncIterator[Database]:
    """A database with rows of the third schema."""
    db = Database(database_url)
    await db.migrate("0003")
    await insert(db, "sessions", SESSION)
    for number, trainable in enumerate(TRAINABLES):
        await insert(db, "training_runs", run(number, trainable))
        await insert(db, "checkpoints", checkpoint(number, trainable))
    for hour, amount in ((3600, 5), (7200, 2**40)):
        usage = {"hour": hour, "kind": "training", "session_id": "s", "base_model": "tiny", "amount": amount}
        await insert(db, "usage", usage)
    drawn = {"hour": 3600, "kind": "sampled", "session_id": NO_SESSION, "base_model": "tiny", "amount": 7}
    await insert(db, "usage", drawn)
    yield db
    await db.close()


@pytest.fixture
async def migrated(old: Database) -> Database:
    """Return it after the migration to the newest schema."""
    await old.migrate()
    return old


@pytest.mark.slow
async def test_a_migration_that_is_killed_at_any_statement_changes_nothing(old: Database, database_url: str) -> None:
    assert await asyncio.to_thread(run_script, KILLED, database_url) > 10
    await old.migrate()
    await test_the_columns_of_lora_become_one_equal_value(old)
    await test_usage_belongs_to_the_owner_of_its_session(old)


async def test_the_columns_of_lora_become_one_equal_value(migrated: Database) -> None:
    runs, checkpoints = RunStore(migrated), CheckpointStore(migrated)
    for number, trainable in enumerate(TRAINABLES):
        found = await runs.get(f"s:train:{number}")
        assert found.trainable == trainable and found.trainable.layout == "own"
        assert (found.owner, found.status, found.snapshot) == ("alice", "suspended", f"checkpoints/{number}")
        assert (found.user_metadata, found.created_at) == ({"n": number}, 3.25)
        saved = await checkpoints.find(TinkerPath(f"s:train:{number}", "weights", "a"))
        assert saved is not None and saved.trainable == trainable
        assert (saved.public, saved.size_bytes, saved.created_at) == (number % 2 == 0, 2**40, 4.5)
        assert saved.base_fingerprint is None and saved.user_metadata is None
    rows, total = await Catalog(migrated).checkpoints(Page(Scope("alice"), 100, 0), ["weights"], 5.0)
    assert total == len(TRAINABLES) and {row.trainable.rank for row in rows} == {t.rank for t in TRAINABLES}


async def test_usage_belongs_to_the_owner_of_its_session(migrated: Database) -> None:
    usage = UsageStore(migrated)
    (amounts,) = [page async for page in usage.between("alice", 0, 10_000)]
    assert [(one.hour, one.kind, one.amount) for one in amounts] == [(3600, "training", 5), (7200, "training", 2**40)]
    assert {one.session_id for one in amounts} == {"s"}
    (found,) = [page async for page in usage.metadata("alice", ["s", "unknown"])]
    assert [(name, json.loads(noted)) for name, noted in found] == [("s", {"größe": "fünf"})]
    assert [page async for page in usage.between("bob", 0, 10_000)] == []


async def test_usage_of_samples_outside_of_any_session_is_kept(migrated: Database) -> None:
    ((drawn,),) = [page async for page in UsageStore(migrated).between("local", 0, 10_000)]
    assert (drawn.hour, drawn.kind, drawn.amount, drawn.project_id) == (3600, "sampled", 7, None)
