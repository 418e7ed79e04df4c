"""Runs are sorted, filtered and grouped by the latest value of any metric, and their trends are drawn."""

import sys

import pytest
from sqlalchemy import event, insert, text

from tinker_server.api_schemas.training import Trainable
from tinker_server.errors import BadRequest
from tinker_server.store import run_metrics
from tinker_server.store.catalog import Catalog, Page, Scope
from tinker_server.store.client_metrics import ClientMetricStore
from tinker_server.store.database import Database
from tinker_server.store.futures.records import Result
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.records import Step
from tinker_server.store.run_groups import RunTable
from tinker_server.store.run_metrics import Order
from tinker_server.store.run_search import Group, RunSearch, words_of
from tinker_server.store.runs import RunStore
from tinker_server.store.steps import StepStore
from tinker_server.store.tables import SessionRow, TrainingRunRow

PAGE = Page(Scope("alice"), 50, 0)


def batch(seq_id: int, step: int, loss: float) -> Step:
    return Step(
        model_id="m", seq_id=seq_id, step=step, at=0.0, tokens=10, loss=loss, loss_tokens=10, waited_s=1, run_s=2
    )


def applied(seq_id: int, step: int, rate: float) -> Step:
    return Step(model_id="m", seq_id=seq_id, step=step, at=0.0, learning_rate=rate, grad_norm=3.0, waited_s=0, run_s=0)


async def record(db: Database, steps: list[Step]) -> None:
    """Store steps as results are stored."""
    rows = FutureRows(db)
    await rows.finish([(str(step.seq_id), Result(b"{}", "application/json", step=step)) for step in steps])


async def add_runs(db: Database, *run_ids: str) -> None:
    """Add runs of Alice's, whose metadata tell the learning rate: of the first 1, of all others 2."""
    session_row = {"session_id": "s", "owner": "alice", "tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    rows = [
        {
            "model_id": run_id,
            "owner": "alice",
            "session_id": "s",
            "model_seq_id": number,
            "base_model": "tiny",
            "trainable": Trainable(rank=8, seed=0),
            "user_metadata": {"lr": "1" if number == 0 else "2"},
            "optimizer_config": {},
            "status": "suspended",
            "created_at": float(number),
        }
        for number, run_id in enumerate(run_ids)
    ]
    async with db.write() as session:
        await session.execute(insert(SessionRow), [session_row | {"created_at": 0.0, "last_heartbeat": 0.0}])
        await session.execute(insert(TrainingRunRow), rows)


async def report(db: Database, name: str, **values: list[float]) -> None:
    """Report a metric of runs, a value for each step."""
    store = ClientMetricStore(db)
    for run_id, of_run in values.items():
        for step, value in enumerate(of_run):
            await store.put(run_id, step, {name: value}, 0.0)


async def ids(db: Database, query: str = "", order: Order | None = None, group: Group | None = None) -> list[str]:
    search = RunSearch(words_of("q", query), {"active": "idle"}, {}, False, group)
    found, total = await Catalog(db).runs(PAGE, 1.0, search, order)
    assert total == len(found)
    return [one.run.model_id for one in found]


async def test_runs_are_sorted_by_the_latest_value_and_those_without_come_last(db: Database) -> None:
    await add_runs(db, "a", "b", "c", "d")
    await report(db, "reward", a=[9, 1], b=[0, 3], d=[2])
    assert await ids(db) == ["d", "c", "b", "a"]
    assert await ids(db, order=Order("reward")) == ["b", "d", "a", "c"]
    assert await ids(db, order=Order("reward", is_descending=False)) == ["a", "d", "b", "c"]


async def test_a_word_compares_a_metric_and_joins_other_words(db: Database) -> None:
    await add_runs(db, "a", "b", "c")
    await report(db, "test/acc", a=[0.2], b=[0.6], c=[0.9])
    assert await ids(db, "test/acc>0.5") == ["c", "b"]
    assert await ids(db, "test/acc>=0.6 test/acc<0.9") == ["b"]
    assert await ids(db, "test/acc<5e-1 tiny") == ["a"]
    assert await ids(db, "loss>0") == []


async def test_recorded_metrics_have_the_value_of_the_last_operation_that_has_them(db: Database) -> None:
    await add_runs(db, "m")
    await record(db, [batch(1, 0, loss=50.0), applied(2, 0, rate=0.1), batch(3, 1, loss=20.0), applied(4, 1, rate=0.2)])
    await report(db, "loss", m=[7.0])
    names = [*run_metrics.RECORDED, "client:loss", "none"]
    assert (await RunTable(db).latest("alice", ["m"], names))["m"] == pytest.approx(
        {
            "steps": 2,
            "tokens": 0,
            "loss": 2.0,
            "tokens_per_s": 5.0,
            "grad_norm": 3.0,
            "learning_rate": 0.2,
            "client:loss": 7.0,
        }
    )


async def test_a_trend_has_evenly_spaced_values_from_the_first_to_the_last(db: Database) -> None:
    await add_runs(db, "m", "other")
    await record(db, [batch(number + 1, number, loss=10.0 * (100 - number)) for number in range(100)])
    await report(db, "reward", m=[float(step) for step in range(3)])
    table = RunTable(db)
    losses = (await table.trends("alice", ["m", "other"], "loss"))["m"]
    assert losses[0] == 100.0 and len(losses) == run_metrics.TREND_POINTS and losses == sorted(losses, reverse=True)
    rewards = (await table.trends("alice", ["m"], "reward"))["m"]
    assert rewards[0] == 0.0 and rewards[-1] == 2.0


async def test_a_trend_has_the_values_of_steps_with_the_largest_numbers(db: Database) -> None:
    await add_runs(db, "m")
    last, store = 2**53 - 1, ClientMetricStore(db)
    await store.put("m", 0, {"reward": 1.0}, 0.0)
    await store.put("m", last, {"reward": 2.0}, 0.0)
    await record(db, [batch(1, 0, loss=50.0), batch(2**62, 1, loss=20.0)])
    table = RunTable(db)
    assert (await table.trends("alice", ["m"], "reward"))["m"] == [1.0] + [2.0] * (run_metrics.TREND_POINTS - 1)
    assert (await table.trends("alice", ["m"], "loss"))["m"] == [5.0, 2.0]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("metric", "number"), [("reward", "step"), ("loss", "seq_id")])
async def test_each_value_of_a_trend_is_found_by_the_index(db: Database, metric: str, number: str) -> None:
    """Else PostgreSQL would read a run's rows once for each value."""
    async with db.read() as session:
        connection, asked = await session.connection(), []
        event.listen(connection.sync_connection, "before_cursor_execute", lambda *of: asked.append(of[2:4]))
        await run_metrics.trends(session, ["m"], metric)
        statement, values = asked[0]
        await connection.execute(text("SET LOCAL enable_seqscan = off"))  # the tables are empty
        await connection.execute(text("SET LOCAL enable_bitmapscan = off"))
        plan = [line for (line,) in await connection.exec_driver_sql(f"EXPLAIN {statement}", values)]
    assert any("Index Cond" in line and f"({number} >=" in line for line in plan), "\n".join(plan)


async def test_groups_have_means_and_their_runs_are_found(db: Database) -> None:
    await add_runs(db, "a", "b", "c")
    await report(db, "reward", a=[5.0], b=[1.0], c=[3.0])
    assert await RunTable(db).names_of_runs("alice", ["a", "b"]) == ["reward"]
    first, second = await RunTable(db).groups("alice", RunSearch([], {}, {}), "lr", ["reward", "loss"])
    assert (first.group, first.count, first.means["reward"].mean) == (Group("lr", "2"), 2, 2.0)
    assert first.means["reward"].deviation == 1.0 and "loss" not in first.means
    assert (second.count, second.means["reward"].mean, second.means["reward"].deviation) == (1, 5.0, 0.0)
    assert await ids(db, group=first.group) == ["c", "b"]


@pytest.mark.parametrize(
    ("values", "mean", "deviation"),
    [
        ([1e9 - 1, 1e9 + 1], 1e9, 1.0),
        ([1e200, 3e200], 2e200, 1e200),
        ([sys.float_info.max, sys.float_info.max], sys.float_info.max, 0.0),
        ([-sys.float_info.max, sys.float_info.max], 0.0, sys.float_info.max),
    ],
)
async def test_the_mean_of_a_group_is_exact_for_close_and_for_huge_values(
    db: Database, values: list[float], mean: float, deviation: float
) -> None:
    await add_runs(db, "a", "b", "c")
    await report(db, "reward", b=values[:1], c=values[1:])
    group, _ = await RunTable(db).groups("alice", RunSearch([], {}, {}), "lr", ["reward"])
    assert (group.means["reward"].mean, group.means["reward"].deviation) == (mean, deviation)


async def test_archived_runs_are_listed_apart_and_deleted_runs_leave_nothing(db: Database) -> None:
    await add_runs(db, "m", "other")
    await record(db, [batch(1, 0, loss=5.0)])
    await report(db, "reward", m=[1.0])
    runs = RunStore(db)
    await runs.set_archived("m", "alice", 5.0)
    assert await ids(db) == ["other"]
    with pytest.raises(BadRequest, match="the run m has not ended: it is suspended"):
        await runs.delete("m", "alice")
    await runs.mark_lost("m")
    await runs.delete("m", "alice")
    assert await runs.find("m") is None
    assert await StepStore(db).last("m") is None
    assert await ClientMetricStore(db).last_step("m") is None


async def test_a_name_that_no_metric_has_is_refused(db: Database) -> None:
    with pytest.raises(BadRequest, match="metric: the name"):
        await ids(db, order=Order("a\0b"))
