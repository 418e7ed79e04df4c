"""Grants among owners and their keys, and keys that are prioritized."""

import asyncio

from tinker_server.backends.processes.fair_queue import FairQueue


class Log:
    """The grants, in order. Each is held for longer than the pause after it."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.granted: list[str] = []

    async def work(self, owner: str, key: str, count: int) -> None:
        for _ in range(count):
            async with self.queue.grant(owner, key):
                self.granted.append(f"{owner}{key}")
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.003)

    async def work_prioritized(self, owner: str, key: str, count: int) -> None:
        with self.queue.prioritize(owner, key):
            await self.work(owner, key, count)


async def test_a_prioritized_key_lets_nobody_between_its_grants() -> None:
    log = Log()
    others = [asyncio.create_task(log.work("b", f"{number}", 3)) for number in range(3)]
    await asyncio.sleep(0.005)
    num_before = len(log.granted)
    await log.work_prioritized("a", "0", 5)
    assert log.granted[num_before:][:5] == ["a0"] * 5
    await asyncio.gather(*others)
    assert sorted(log.granted[num_before + 5 :] + log.granted[:num_before]) == sorted(["b0", "b1", "b2"] * 3)


async def test_prioritized_keys_share_fairly_among_owners() -> None:
    log = Log()
    flood = [asyncio.create_task(log.work_prioritized("a", f"{number}", 4)) for number in range(4)]
    other = asyncio.create_task(log.work("c", "0", 1))
    await log.work_prioritized("b", "0", 4)
    assert log.granted.count("b0") == 4 and len(log.granted) <= 10, log.granted
    assert not other.done()
    await asyncio.gather(*flood, other)
    assert log.granted[-1] == "c0"


async def test_a_prioritized_request_that_is_cancelled_leaves_the_grants_to_others() -> None:
    log = Log()
    holding = asyncio.Event()

    async def hold() -> None:
        async with log.queue.grant("c", "0"):
            await holding.wait()

    held = asyncio.create_task(hold())
    await asyncio.sleep(0)
    first = asyncio.create_task(log.work_prioritized("a", "0", 1))
    other = asyncio.create_task(log.work("b", "0", 1))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    holding.set()
    await asyncio.wait_for(asyncio.gather(held, other), 5)
    assert log.granted == ["b0"]


async def test_it_is_idle_for_as_long_as_nothing_was_granted_or_waited_or_had_priority() -> None:
    log = Log()
    queue = log.queue
    await asyncio.sleep(0.02)
    assert 0.02 <= queue.idle_s < 10
    async with queue.grant("a", "0"):
        await asyncio.sleep(0.02)
        assert queue.idle_s == 0
        waiting = asyncio.create_task(log.work("b", "0", 1))
        await asyncio.sleep(0)
    assert queue.idle_s == 0
    await waiting
    await asyncio.sleep(0.05)
    before_s = queue.idle_s
    with queue.prioritize("a", "0"):
        assert queue.idle_s == 0
    assert 0 < queue.idle_s < before_s


async def test_grants_of_a_free_queue_count_when_several_wait_later() -> None:
    queue, granted = FairQueue(), list[str]()

    async def work(owner: str) -> None:
        async with queue.grant(owner, "0"):
            granted.append(owner)

    await work("a")
    await work("b")
    async with queue.grant("c", "0"):
        waiting = [asyncio.create_task(work(owner)) for owner in ("b", "a")]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert granted == ["a", "b", "a", "b"]


async def test_a_small_request_waits_behind_a_large_one_though_there_is_room_for_it() -> None:
    queue, granted = FairQueue(4), list[str]()

    async def work(owner: str, size: int) -> None:
        async with queue.grant(owner, "0", size):
            granted.append(owner)

    async with queue.grant("a", "0", 3) as shrink:
        waiting = [asyncio.create_task(work("large", 3)), asyncio.create_task(work("small", 1))]
        await asyncio.sleep(0)
        assert granted == []
        shrink(1)
        await asyncio.sleep(0.01)
        assert granted == ["large", "small"]
    await asyncio.gather(*waiting)


async def test_a_request_that_waits_for_what_its_owner_holds_delays_no_other_owner() -> None:
    queue, granted = FairQueue(4), list[str]()

    async def work(owner: str, size: int) -> None:
        async with queue.grant(owner, "0", size):
            granted.append(owner)
            await asyncio.sleep(0)

    async with queue.grant("large", "0", 3):
        waiting = [asyncio.create_task(work("large", size)) for size in (3, 1)]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            for _ in range(3):
                await work("small", 1)
        assert granted == ["small"] * 3, "and the owner's own small request waits behind its large one"
        waiting.append(asyncio.create_task(work("small", 2)))
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert granted[3] == "large", "once it holds nothing, it is not overtaken"


async def test_a_request_that_fits_beside_what_its_owner_holds_is_not_overtaken() -> None:
    queue, granted = FairQueue(4), list[str]()

    async def work(owner: str, size: int) -> None:
        async with queue.grant(owner, "0", size):
            granted.append(owner)

    async with queue.grant("large", "0", 1):
        async with queue.grant("small", "0", 2):
            waiting = [asyncio.create_task(work("large", 3)), asyncio.create_task(work("small", 1))]
            await asyncio.sleep(0.01)
            assert granted == [], "else a flood of small requests would delay the large request without end"
        await asyncio.sleep(0.01)
        assert granted == ["large", "small"]
    await asyncio.gather(*waiting)


async def test_a_request_that_is_cancelled_at_its_grant_gives_it_back() -> None:
    queue, held = FairQueue(), asyncio.Event()

    async def work() -> None:
        async with queue.grant("b", "0"):
            held.set()

    async with queue.grant("a", "0"):
        waiting = asyncio.create_task(work())
        await asyncio.sleep(0)
    waiting.cancel()  # it is granted, and has not gone on
    await asyncio.wait([waiting])
    assert not held.is_set()
    async with asyncio.timeout(5), queue.grant("a", "0"):
        pass
