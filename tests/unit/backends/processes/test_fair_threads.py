"""Threads work for owners in turn, and for each owner on few things at once."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from tinker_server.backends.processes.fair_threads import FairThreads

NAME: ContextVar[str] = ContextVar("NAME")


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads(2, "test")
    yield made
    made.close()


class Door:
    """Work that begins, and ends once it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.begun.set()
        assert self.may_end.wait(10)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 10)


async def test_a_flood_of_one_owner_takes_one_thread_and_keeps_its_order(threads: FairThreads) -> None:
    door, order = Door(), list[int]()
    first = asyncio.create_task(threads.run("mallory", door.pass_through))
    flood = [asyncio.create_task(threads.run("mallory", order.append, number)) for number in range(20)]
    await door.entered()
    assert await asyncio.wait_for(threads.run("alice", lambda: "at once"), 5) == "at once"
    assert not order
    door.may_end.set()
    await asyncio.gather(first, *flood)
    assert order == list(range(20))


async def test_owners_take_turns_when_all_threads_are_taken(threads: FairThreads) -> None:
    doors, order = [Door(), Door()], list[str]()
    held = [asyncio.create_task(threads.run(f"holder {n}", door.pass_through)) for n, door in enumerate(doors)]
    await asyncio.gather(*(door.entered() for door in doors))
    flood = [asyncio.create_task(threads.run("mallory", order.append, "mallory")) for _ in range(10)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(threads.run(owner, order.append, owner)) for owner in ("alice", "bob")]
    await asyncio.sleep(0)
    doors[0].may_end.set()  # one thread does it all, so the order is known
    await asyncio.gather(held[0], *flood, *late)
    doors[1].may_end.set()
    await held[1]
    assert order[:3] == ["mallory", "alice", "bob"] and order[3:] == ["mallory"] * 9


async def test_more_threads_may_work_for_an_owner_while_others_find_one_free() -> None:
    threads, doors = FairThreads(3, "test", of_owner=2), [Door(), Door(), Door()]
    try:
        held = [asyncio.create_task(threads.run("mallory", door.pass_through)) for door in doors]
        await asyncio.gather(doors[0].entered(), doors[1].entered())
        assert await asyncio.wait_for(threads.run("alice", lambda: 1), 5) == 1
        assert not doors[2].begun.is_set()
        for door in doors:
            door.may_end.set()
        await asyncio.gather(*held)
    finally:
        threads.close()


async def test_cancelled_work_is_forgotten_if_it_waits_and_keeps_its_turn_while_it_runs(threads: FairThreads) -> None:
    class Body:
        """What an argument holds in memory."""

    door, body, done = Door(), Body(), list[str]()
    held = weakref.ref(body)
    running = asyncio.create_task(threads.run("mallory", door.pass_through))
    waiting = asyncio.create_task(threads.run("mallory", id, body))
    await door.entered()
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait([running, waiting])
    del body, waiting, task
    gc.collect()
    assert held() is None
    after = asyncio.create_task(threads.run("mallory", done.append, "after"))
    await threads.run("alice", lambda: None)
    await asyncio.sleep(0.05)
    assert not done, "the thread still works for the cancelled request"
    door.may_end.set()
    await after
    assert done == ["after"]


async def test_errors_and_contexts_pass_through(threads: FairThreads) -> None:
    NAME.set("of the caller")
    assert await threads.run("alice", NAME.get) == "of the caller"
    with pytest.raises(ZeroDivisionError):
        await threads.run("alice", lambda: 1 // 0)
    assert await threads.run("alice", lambda: "still works") == "still works"


async def test_thousands_of_calls_of_many_owners_are_each_done_once(threads: FairThreads) -> None:
    calls = [threads.run(f"owner {number % 7}", int, number) for number in range(3000)]
    assert await asyncio.gather(*calls) == list(range(3000))


@pytest.mark.flaky(reruns=1)  # holds limits of wall time
async def test_behind_a_long_call_its_owners_next_waits_as_long_and_another_owners_does_not() -> None:
    threads = FairThreads(2, "test", long_s=0.1)

    def work(busy_s: float) -> tuple[float, float]:
        began_s, until_s = time.monotonic(), time.thread_time() + busy_s
        while time.thread_time() < until_s:
            pass
        return began_s, time.monotonic()

    async def pause_s(busy_s: float, following: str) -> float:
        """Return the seconds between a call of `a` and the next call of `following`."""
        first, second = await asyncio.gather(threads.run("a", work, busy_s), threads.run(following, work, 0.0))
        return second[0] - first[1]

    assert await pause_s(0.3, "a") > 0.25
    assert await pause_s(0.3, "b") < 0
    assert await pause_s(0.02, "a") < 0.02
    threads.close()
