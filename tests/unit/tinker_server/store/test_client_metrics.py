"""Metrics of clients are replaced by step, averaged in groups, bounded in number, and deleted when they are old."""

import math
import sys
from fractions import Fraction

import pytest

from tinker_server.errors import LimitReached
from tinker_server.store import client_metrics
from tinker_server.store.client_metrics import ClientMetricStore
from tinker_server.store.database import Database


async def test_a_metric_is_a_series_by_step_and_a_later_value_replaces_the_earlier(db: Database) -> None:
    store = ClientMetricStore(db)
    await store.put("m", 0, {"reward": 0.25, "kl": 9.0}, at=1.0)
    await store.put("m", 3, {"reward": 0.5}, at=2.0)
    await store.put("m", 3, {"reward": 0.75}, at=3.0)
    await store.put("other", 7, {"secret": 1.0}, at=3.0)
    assert await store.names("m") == ["kl", "reward"] and await store.last_step("m") == 3
    points = await store.points("m", ["reward"], (0, 3), 100)
    assert [(one.step, one.value, one.at) for one in points["reward"]] == [(0, 0.25, 1.0), (3, 0.75, 3.0)]
    assert (await store.points("m", ["secret"], (0, 9), 100)) == {"secret": []}
    assert await store.last_step("nobody") is None


async def test_many_steps_are_means_of_neighbours_and_a_sparse_metric_keeps_its_own(db: Database) -> None:
    store = ClientMetricStore(db)
    for step in range(100):
        await store.put("m", step, {"reward": float(step)} | ({"test": 5.0} if step % 50 == 0 else {}), at=step)
    points = await store.points("m", ["reward", "test"], (0, 99), 10)
    assert [one.value for one in points["reward"]] == pytest.approx([10 * k + 4.5 for k in range(10)])
    assert [one.step for one in points["reward"]] == list(range(9, 100, 10))
    assert [(one.step, one.value) for one in points["test"]] == [(0, 5.0), (50, 5.0)]
    assert [one.step for one in (await store.points("m", ["reward"], (20, 29), 10))["reward"]] == list(range(20, 30))


async def test_a_jump_of_the_clients_steps_does_not_average_those_before_it(db: Database) -> None:
    store = ClientMetricStore(db)
    steps = [*range(20), 10**9, *range(2 * 10**9, 2 * 10**9 + 19)]
    for step in steps:
        await store.put("m", step, {"reward": float(step)}, at=0)
    assert [one.step for one in (await store.points("m", ["reward"], (0, steps[-1]), 40))["reward"]] == steps
    averaged = (await store.points("m", ["reward"], (0, steps[-1]), 20))["reward"]
    assert [(one.step, one.value) for one in averaged[:2]] == [(1, 0.5), (3, 2.5)] and len(averaged) == 20


async def test_pages_hold_every_value_once_and_old_ones_are_deleted(db: Database) -> None:
    store = ClientMetricStore(db)
    for step in range(5):
        await store.put("m", step, {"a": 1.0, "b": 2.0}, at=float(step))
    found = [(one.name, one.step) async for page in store.pages("m", 3) for one in page]
    assert found == [(name, step) for name in "ab" for step in range(5)]
    assert await store.expire(before=2.0) == 4
    assert [one.step async for page in store.pages("m", 100) for one in page] == [2, 3, 4] * 2


async def test_a_run_has_a_bounded_number_of_metrics(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "MAX_NAMES", 2)
    store = ClientMetricStore(db)
    await store.put("m", 0, {"a": 1.0, "b": 1.0}, at=0)
    await store.put("m", 1, {"a": 2.0}, at=1)
    with pytest.raises(LimitReached, match="3 names; 2 are allowed"):
        await store.put("m", 1, {"a": 3.0, "c": 3.0}, at=1)
    assert [one.value for one in (await store.points("m", ["a"], (0, 9), 100))["a"]] == [1.0, 2.0]


async def test_a_run_has_a_bounded_number_of_values_and_a_replaced_one_counts_once(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_metrics, "MAX_VALUES", 4)
    store = ClientMetricStore(db)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        await store.put("m", 0, {"a": value, "b": value}, at=0)
    await store.put("m", 1, {"a": 1.0}, at=1)
    for reader in (store, ClientMetricStore(db)):  # the second counts what is stored
        with pytest.raises(LimitReached, match="5 values; 4 are allowed"):
            await reader.put("m", 2, {"a": 1.0, "b": 1.0}, at=2)
    await store.put("other", 2, {"a": 1.0, "b": 1.0}, at=2)
    await store.expire(before=1)
    assert await store.names("m") == ["a"]
    await store.put("m", 2, {"a": 1.0, "c": 1.0}, at=2)
    assert await store.names("m") == ["a", "c"]


LARGEST = sys.float_info.max
"""Its mean with itself, and with anything else, is a float; its sum is none."""


@pytest.mark.parametrize(
    "values",
    [
        [1.7e308, 1.7e308],
        [1e200, 2e200],
        [LARGEST] * 7,
        [-LARGEST] * 7,
        [LARGEST, -LARGEST, 3.0],
        [5e-324, 5e-324],
        [LARGEST, 5e-324],
        [0.1, 0.25, 1e300],
    ],
)
async def test_a_mean_of_the_largest_and_least_numbers_is_right(db: Database, values: list[float]) -> None:
    store = ClientMetricStore(db)
    for step, value in enumerate(values):
        await store.put("m", step, {"a": value}, at=1.0)
    (point,) = (await store.points("m", ["a"], (0, len(values) - 1), 1))["a"]
    expected = sum(map(Fraction, values), Fraction()) / len(values)
    assert math.isfinite(point.value) and abs(Fraction(point.value) - expected) <= abs(expected) * Fraction(1, 10**12)
    whole = (await store.points("m", ["a"], (0, len(values) - 1), 100))["a"]
    assert [one.value for one in whole] == values
