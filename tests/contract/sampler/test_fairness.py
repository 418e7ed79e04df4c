"""Nobody waits long for the engine, however much of it others ask for."""

import asyncio

import pytest

from tests.factories import MIXED, prompt, words
from tests.sampling import RANKS, request, sample

pytestmark = pytest.mark.asyncio(loop_scope="package")

ENDLESS = {"max_tokens": 60, "stop": []}


async def test_a_fifth_adapter_beside_four_busy_ones_is_served_when_the_first_slot_is_free(sampler, adapters):
    """Three streams of each of four adapters, which would keep all four slots for ever."""
    *busy, fifth = RANKS
    finished = 0

    async def stream(name: str, number: int) -> None:
        nonlocal finished
        while True:
            await sample(sampler, request(prompt(words(9, number)), ENDLESS), adapters[name], owner=name)
            finished += 1

    streams = [asyncio.create_task(stream(name, number)) for name in busy for number in range(3)]
    await asyncio.sleep(1)
    finished = 0
    try:
        async with asyncio.timeout(60):
            await sample(sampler, request(MIXED["text"], {"max_tokens": 5}), adapters[fifth], owner=fifth)
    finally:
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert finished <= 24  # each stream's running sample, and one more


async def test_an_owner_who_floods_the_sampler_does_not_delay_anothers_small_request(sampler, adapters):
    long = request(MIXED["text"], {"max_tokens": 300, "stop": []})
    flood = [asyncio.create_task(sample(sampler, long, None, owner="many")) for _ in range(600)]
    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    done = sum(one.done() for one in flood)
    for name in (None, "small"):
        await sample(sampler, request(MIXED["text"], {"max_tokens": 5}), adapters[name], owner="few")
    try:
        assert sum(one.done() for one in flood) < done + 256  # the first 256 end together; not the next
    finally:
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
