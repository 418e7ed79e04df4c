"""Turns on what can serve few at once."""

import asyncio

import pytest

from tinker_server.turns import FairTurns


async def served(turns: FairTurns, order: list[str], owner: str, key: str, name: str, size: int = 1) -> None:
    async with turns.turn(owner, key, size):
        order.append(name)
        await asyncio.sleep(0)


async def order_of(turns: FairTurns, *requests: tuple[str, str, str]) -> list[str]:
    """Names in the order they are served in, asked for in the order given while somebody holds all."""
    order: list[str] = []
    release = asyncio.Event()

    async def hold() -> None:
        async with turns.turn("a", "held", 10**9):
            await release.wait()

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(served(turns, order, *request)) for request in requests]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(holder, *tasks)
    return order


async def test_a_flood_of_one_owner_delays_another_by_no_more_than_the_running_turn() -> None:
    flood = [("a", f"model {number}", f"a{number}") for number in range(40)]
    assert (await order_of(FairTurns(), *flood, ("b", "model", "b")))[0] == "b"


async def test_owners_take_turns_then_their_keys_then_arrival() -> None:
    requests = [("a", "x", "x1"), ("a", "x", "x2"), ("a", "y", "y1"), ("b", "z", "z1"), ("b", "z", "z2")]
    assert await order_of(FairTurns(), *requests) == ["z1", "x1", "z2", "y1", "x2"]


async def test_no_more_than_the_capacity_is_held_at_once() -> None:
    turns, held, most = FairTurns(3), 0, 0

    async def hold(size: int) -> None:
        nonlocal held, most
        async with turns.turn("a", "k", size):
            held += size
            most = max(most, held)
            await asyncio.sleep(0)
            held -= size

    await asyncio.gather(*[hold(size) for size in (1, 2, 3, 1, 1, 2, 1)])
    assert (held, most) == (0, 3)


async def test_more_than_there_is_means_all_of_it() -> None:
    async with asyncio.timeout(5):
        await order_of(FairTurns(2), ("a", "k", "large"))
        turns = FairTurns(2)
        await served(turns, [], "a", "k", "large", size=100)
        await served(turns, [], "a", "k", "again", size=2)


@pytest.mark.parametrize("steps", [0, 1])
async def test_who_gives_up_leaves_the_turn_to_the_next(steps: int) -> None:
    turns, order = FairTurns(), list[str]()
    async with asyncio.timeout(5):
        async with turns.turn("a", "k"):
            gone = asyncio.create_task(served(turns, order, "a", "k", "gone"))
            await asyncio.sleep(0)
            next_one = asyncio.create_task(served(turns, order, "a", "k", "next"))
            await asyncio.sleep(0)
            if steps == 0:
                gone.cancel()
        if steps:
            gone.cancel()
        await asyncio.gather(gone, next_one, return_exceptions=True)
        await served(turns, order, "b", "k", "last")
    assert order[-2:] == ["next", "last"]
