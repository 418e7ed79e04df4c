"""Recorded steps are written with their results, drawn in groups, and deleted when they are old."""

import json
from dataclasses import asdict, replace

import pytest

from tinker_server.store.database import Database
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import Step
from tinker_server.store.steps import StepStore


def batch(seq_id: int, step: int, loss: float, tokens: int = 10, at: float = 0.0) -> Step:
    return Step(
        model_id="m", seq_id=seq_id, step=step, at=at, tokens=tokens, loss=loss, loss_tokens=tokens, waited_s=1, run_s=2
    )


def applied(seq_id: int, step: int, rate: float, at: float = 0.0) -> Step:
    return Step(model_id="m", seq_id=seq_id, step=step, at=at, learning_rate=rate, grad_norm=3.0, waited_s=0, run_s=0)


def run_of(num_steps: int) -> list[Step]:
    """Two batches and an optim_step each; the loss falls."""
    steps: list[Step] = []
    for step in range(num_steps):
        steps += [batch(3 * step + part, step, loss=float(20 * (num_steps - step)), at=step) for part in (1, 2)]
        steps.append(applied(3 * step + 3, step, rate=0.1 * (step + 1), at=step + 0.5))
    return steps


async def record(db: Database, steps: list[Step]) -> None:
    """Store steps as results are stored."""
    rows = FutureRows(db)
    await rows.finish([(str(step.seq_id), Result(b"{}", "application/json", step=step)) for step in steps])


async def test_a_step_is_stored_in_the_transaction_of_its_result(db: Database, futures: FutureStore) -> None:
    accepted = await futures.queue.enqueue(Operation("forward_backward", "m", 1, b"body", "application/json", "alice"))
    step = batch(1, 0, loss=5.0)
    futures.queue.complete(accepted.request_id, Result(b"{}", "application/json", step=step))
    await futures.queue.flush()
    assert await StepStore(db).recent(["m", "other"]) == {"m": [step]}


async def test_a_result_that_is_stored_twice_leaves_one_row(db: Database) -> None:
    await record(db, [batch(1, 0, loss=5.0)])
    await record(db, [batch(1, 0, loss=7.0)])
    assert await StepStore(db).last("m") == batch(1, 0, loss=5.0)


async def test_each_step_is_a_point_with_its_loss_per_token_and_its_rates(db: Database) -> None:
    await record(db, run_of(4))
    points = await StepStore(db).points("m", 0, 3, 100)
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert [point.loss for point in points] == pytest.approx([8, 6, 4, 2])  # 2 x 20 x n over 20 tokens
    assert [point.learning_rate for point in points] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert {point.grad_norm for point in points} == {3.0}
    assert {point.tokens_per_s for point in points} == {5.0}
    assert {(point.waited_s, point.run_s, point.advantage) for point in points} == {(2, 4, None)}


async def test_the_points_of_a_curve_are_numbers_of_json(db: Database) -> None:
    await record(db, run_of(4))
    points = [asdict(point) for point in await StepStore(db).points("m", 0, 3, 100)]
    assert json.loads(json.dumps(points)) == points


async def test_a_long_run_is_drawn_in_groups_and_a_part_of_it_in_full(db: Database) -> None:
    await record(db, run_of(10))
    store = StepStore(db)
    groups = await store.points("m", 0, 9, 5)
    assert [point.step for point in groups] == [1, 3, 5, 7, 9]
    assert [point.loss for point in groups] == pytest.approx([19, 15, 11, 7, 3])
    assert [point.learning_rate for point in groups] == pytest.approx([0.15, 0.35, 0.55, 0.75, 0.95])
    part = await store.points("m", 4, 6, 5)
    assert [(point.step, point.loss) for point in part] == [(4, 12), (5, 10), (6, 8)]


async def test_a_point_has_the_loss_of_the_positions_whose_loss_is_known(db: Database) -> None:
    await record(db, [batch(1, 0, loss=20.0), replace(batch(2, 0, loss=0.0), loss=None), batch(3, 1, loss=40.0)])
    assert [point.loss for point in await StepStore(db).points("m", 0, 1, 2)] == [2.0, 4.0]
    assert [point.loss for point in await StepStore(db).points("m", 0, 1, 1)] == [3.0]


async def test_the_rate_of_a_point_leaves_out_the_time_of_optim_steps(db: Database) -> None:
    await record(db, [batch(1, 0, loss=5.0), replace(applied(2, 0, rate=0.1), run_s=8.0)])
    (point,) = await StepStore(db).points("m", 0, 0, 1)
    assert (point.tokens_per_s, point.run_s) == (5.0, 10.0)


async def test_all_rows_of_a_run_come_in_order_page_by_page(db: Database) -> None:
    steps = run_of(5)
    await record(db, steps)
    pages = [page async for page in StepStore(db).pages("m", 4)]
    assert [len(page) for page in pages] == [4, 4, 4, 3]
    assert [step for page in pages for step in page] == steps


async def test_old_rows_are_deleted_and_the_others_stay(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_server.store.database.DELETED_AT_ONCE", 2)
    await record(db, run_of(4))
    store = StepStore(db)
    assert await store.expire(2.0) == 6
    assert [step.step for step in (await store.recent(["m"], 100))["m"]] == [2, 2, 2, 3, 3, 3]
    assert await store.expire(2.0) == 0
