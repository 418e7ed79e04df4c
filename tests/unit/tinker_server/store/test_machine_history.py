"""The machine's history: a day of it is kept, and it outlives the server."""

from tinker_server.routes.machine_loads import means
from tinker_server.store.database import Database
from tinker_server.store.machine_history import KEPT_S, MachineHistory

CACHE, BUSY = ("kv_cache_used", "a"), ("gpu_utilization", "GPU 0")


async def test_values_are_there_in_order_by_measure_for_a_day(db: Database) -> None:
    history = MachineHistory(db)
    for minute in range(3):
        await history.put({CACHE: minute / 10, BUSY: 0.5}, 60.0 * minute)
    await history.put({CACHE: 0.9}, 60.0 * 2)  # said already
    found = await MachineHistory(db).since(60.0)
    assert list(found) == [BUSY, CACHE]
    assert (found[CACHE].at, found[CACHE].value) == ([60.0, 120.0], [0.1, 0.2])
    await history.put({}, 90.0 + KEPT_S)
    assert (await history.since(0.0))[BUSY].at == [120.0]


def test_a_measure_that_was_not_always_there_has_the_mean_of_when_it_was() -> None:
    assert means([{CACHE: 0.2, BUSY: 1.0}, {BUSY: 0.0}, {CACHE: 0.4}]) == {CACHE: 0.30000000000000004, BUSY: 0.5}
