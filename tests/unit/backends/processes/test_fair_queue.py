"""Turns among owners and their queues, and queues that go before all others."""

import asyncio

from backends.processes.fair_queue import FairTurns


class Log:
    """Who had a turn, in order. Each turn takes longer than the pause after it."""

    def __init__(self) -> None:
        self.turns = FairTurns()
        self.had: list[str] = []

    async def work(self, owner: str, key: str, count: int) -> None:
        for _ in range(count):
            async with self.turns.turn(owner, key):
                self.had.append(f"{owner}{key}")
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.003)

    async def work_first(self, owner: str, key: str, count: int) -> None:
        with self.turns.first(owner, key):
            await self.work(owner, key, count)


async def test_a_queue_that_goes_first_lets_nobody_between_its_turns() -> None:
    log = Log()
    others = [asyncio.create_task(log.work("b", f"{number}", 3)) for number in range(3)]
    await asyncio.sleep(0.005)
    had_before = len(log.had)
    await log.work_first("a", "0", 5)
    assert log.had[had_before:][:5] == ["a0"] * 5
    await asyncio.gather(*others)
    assert sorted(log.had[had_before + 5 :] + log.had[:had_before]) == sorted(["b0", "b1", "b2"] * 3)


async def test_queues_that_go_first_take_turns_among_owners() -> None:
    log = Log()
    flood = [asyncio.create_task(log.work_first("a", f"{number}", 4)) for number in range(4)]
    other = asyncio.create_task(log.work("c", "0", 1))
    await log.work_first("b", "0", 4)
    assert log.had.count("b0") == 4 and len(log.had) <= 10, log.had
    assert not other.done()
    await asyncio.gather(*flood, other)
    assert log.had[-1] == "c0"


async def test_who_goes_first_and_gives_up_leaves_the_turns_to_the_others() -> None:
    log = Log()
    holding = asyncio.Event()

    async def hold() -> None:
        async with log.turns.turn("c", "0"):
            await holding.wait()

    held = asyncio.create_task(hold())
    await asyncio.sleep(0)
    first = asyncio.create_task(log.work_first("a", "0", 1))
    other = asyncio.create_task(log.work("b", "0", 1))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    holding.set()
    await asyncio.wait_for(asyncio.gather(held, other), 5)
    assert log.had == ["b0"]
