"""The engine reports its own batch and cache.

pytest tests/contract/sampler/test_use.py
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.factories import prompt, words
from tests.sampling import request, sample
from tinker_server.backends.protocol import EngineBatch

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def batch(sampler, is_so: Callable[[EngineBatch], bool]) -> EngineBatch:
    """The engine's batch, once it is so."""
    async with asyncio.timeout(60):
        while True:
            use = await sampler.engine_use()
            if use is not None and use.batch is not None and is_so(use.batch):
                batch: EngineBatch = use.batch
                return batch
            await asyncio.sleep(0.02)


async def test_the_engine_reports_its_running_sequences_and_their_part_of_the_cache(sampler):
    idle = await batch(sampler, lambda one: one.running == 0)
    assert idle == EngineBatch(0, 0, 0)
    long = {"max_tokens": 3000, "stop": []}
    drawn = [asyncio.create_task(sample(sampler, request(prompt(words(90, i)), long), None)) for i in range(3)]
    busy = await batch(sampler, lambda one: one.running == 3)
    fuller = await batch(sampler, lambda one: one.cache_used > busy.cache_used)
    assert 0 < busy.cache_used < fuller.cache_used < 1
    for one in drawn:
        one.cancel()
    await asyncio.gather(*drawn, return_exceptions=True)
    assert await batch(sampler, lambda one: one.running == 0) == idle
