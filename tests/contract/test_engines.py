"""Several engines of one model, and an engine of two ranks: real vLLM, with adapters and images.

pytest tests/contract/test_engines.py -m "slow or not slow"
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests.engines import fork_sampler
from tests.factories import MIXED, image, prompt, words
from tests.sampling import ATOL, Reference, assert_close, request, sample, sampler_config, scoring
from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import ModelSpec, Placement
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.embedded import DIRECTORIES, TINY_VL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SOURCE = DIRECTORIES[TINY_VL]
LONG = prompt(words(200, 5), image(96, 64, 1), words(150, 6))
"""Longer than a block of the KV cache on the CPU, in which a prefix is found."""


def spec(scratch: Path, **fields: object) -> ModelSpec:
    config = replace(sampler_config(SOURCE, scratch), max_context_length=2048, kv_cache_bytes=128 << 20)
    return replace(config, **fields)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerPool]:
    """Two engines."""
    running = SamplerPool(spec(tmp_path_factory.mktemp("pool"), placement=Placement(engines=((), ()))), fork_sampler)
    await running.start()
    yield running
    await running.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerPool]:
    """One engine of two ranks."""
    running = SamplerPool(spec(tmp_path_factory.mktemp("divided"), tensor_parallel=2), fork_sampler)
    await running.start()
    yield running
    await running.stop()


async def ready(sampler: SamplerPool) -> SamplerPool:
    """Have all of a pool's engines run: a test that failed may have left one dead."""
    await asyncio.gather(*(engine.wait_until_open() for engine in sampler.engines))
    return sampler


@pytest_asyncio.fixture(loop_scope="module")
async def pool(two_engines: SamplerPool) -> SamplerPool:
    return await ready(two_engines)


@pytest_asyncio.fixture(loop_scope="module")
async def divided(two_ranks: SamplerPool) -> SamplerPool:
    return await ready(two_ranks)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(SOURCE, Renderer(str(SOURCE), image_cache_bytes=1 << 26, max_image_pixels=10**7), {"small": 4})


@pytest.fixture(scope="module")
def adapter(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save("small", 4, tmp_path_factory.mktemp("adapters") / "small")


async def on_each(pool: SamplerPool, weights: Path | None, model_input: object) -> list[SampleResponse]:
    """The same request to each engine, which is chosen by having the others count as dead."""
    found = []
    engines = pool.engines
    try:
        for engine in engines:
            pool.engines = [engine]
            found.append(await sample(pool, scoring(model_input), weights))  # type: ignore[arg-type]
    finally:
        pool.engines = engines
    return found


async def test_both_engines_are_used_and_all_samples_of_a_prompt_go_to_one(pool: SamplerPool) -> None:
    prompts = [prompt(words(300, seed)) for seed in range(6)]
    async with asyncio.TaskGroup() as group:
        for one in prompts:
            group.create_task(sample(pool, request(one, {"max_tokens": 200, "stop": []}, num_samples=2), None))
        async with asyncio.timeout(20):
            while (use := await pool.engine_use()) is None or use.sequences_running < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [len(engine.requests) for engine in pool.engines] == [3, 3]
        assert use.sequences_running == 12 and set(use.engines) == {0, 1}
        assert [one.sequences_running for one in use.engines.values()] == [6, 6]
        of_engines = [engine.requests.copy() for engine in pool.engines]
        for one in prompts:
            group.create_task(sample(pool, request(one, {"max_tokens": 50, "stop": []}), None))
        await asyncio.sleep(0.1)
        assert [len(engine.requests - of) for engine, of in zip(pool.engines, of_engines, strict=True)] == [3, 3]


async def test_a_prompt_whose_samples_both_engines_draw_has_those_of_one_engine(
    pool: SamplerPool, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"max_tokens": 60, "stop": [], "seed": 3}
    drawing = request(MIXED["one image"], params, num_samples=5, prompt_logprobs=True)
    whole = await sample(pool, drawing, adapter)
    monkeypatch.setattr(pool, "_spec", replace(pool._spec, max_concurrent_samples=3))
    asked = asyncio.create_task(sample(pool, drawing, adapter))
    await asyncio.sleep(0.05)
    assert [sum(one.num_samples for one in engine.requests) for engine in pool.engines] == [3, 2]
    divided = await asked
    assert len({one.tokens.tobytes() for one in whole.sequences}) == 5
    for one, other in zip(divided.sequences, whole.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert_close(one.logprobs, other.logprobs)
    assert whole.prompt_logprobs is not None
    assert_close(divided.prompt_logprobs, whole.prompt_logprobs)


async def test_an_adapter_published_once_gives_the_same_log_probabilities_from_both_engines(
    pool: SamplerPool, reference: Reference, adapter: Path
) -> None:
    await pool.publish(adapter, "somebody")
    for model_input in (MIXED["one image"], MIXED["text"], LONG):
        expected = reference.prompt_logprobs(model_input, "small")
        for response in await on_each(pool, adapter, model_input):
            assert response.prompt_logprobs is not None
            assert_close(response.prompt_logprobs, expected)


async def test_an_engine_killed_under_load_loses_nothing_and_the_other_goes_on(
    pool: SamplerPool, adapter: Path
) -> None:
    prompts = [prompt(words(40, seed)) for seed in range(24)]
    greedy = {"max_tokens": 60, "stop": [], "temperature": 0}
    expected = [await sample(pool, request(one, greedy), adapter) for one in prompts[:4]]
    hosts = [engine.supervisor.children[0].process.pid for engine in pool.engines]
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        asked = [
            group.create_task(sample(pool, request(one, greedy), adapter, f"owner {seed % 3}"))
            for seed, one in enumerate(prompts)
        ]
        await asyncio.sleep(0.2)
        assert all(engine.requests for engine in pool.engines)
        psutil.Process(hosts[0]).kill()
    answers = [one.result() for one in asked]
    assert not pool.engines[0].supervisor.is_alive  # all was done before it could start again
    assert pool.engines[1].supervisor.children[0].process.pid == hosts[1]
    for got, wanted in zip(answers, expected, strict=False):
        np.testing.assert_array_equal(got.sequences[0].tokens, wanted.sequences[0].tokens)
        np.testing.assert_allclose(got.sequences[0].logprobs, wanted.sequences[0].logprobs, rtol=0, atol=ATOL)
    async with asyncio.timeout(300):
        await pool.engines[0].wait_until_open()
    # The new engine has an empty scratch directory, and the other one still has its links.
    for response in await on_each(pool, adapter, MIXED["one image"]):
        assert response.prompt_logprobs is not None


@pytest.mark.parametrize("name", [*MIXED, "long"])
async def test_an_engine_of_two_ranks_gives_the_numbers_of_an_engine_of_one(
    pool: SamplerPool, divided: SamplerPool, reference: Reference, adapter: Path, name: str
) -> None:
    model_input = MIXED.get(name, LONG)
    for weights in (None, adapter):
        greedy = request(model_input, {"max_tokens": 20, "stop": [], "temperature": 0}, prompt_logprobs=True)
        one, two = [await sample(sampler, greedy, weights) for sampler in (pool, divided)]
        np.testing.assert_array_equal(one.sequences[0].tokens, two.sequences[0].tokens)
        assert_close(two.sequences[0].logprobs, one.sequences[0].logprobs)
        assert one.prompt_logprobs is not None and two.prompt_logprobs is not None
        assert_close(two.prompt_logprobs, one.prompt_logprobs)
        assert_close(two.prompt_logprobs, reference.prompt_logprobs(model_input, "small" if weights else None))


async def test_ranks_draw_the_same_tokens_and_score_chosen_ones(
    pool: SamplerPool, divided: SamplerPool, adapter: Path
) -> None:
    drawing = request(MIXED["text"], {"max_tokens": 30, "stop": [], "seed": 3}, num_samples=4, topk_prompt_logprobs=3)
    one, two = [await sample(sampler, drawing, adapter) for sampler in (pool, divided)]
    for first, second in zip(one.sequences, two.sequences, strict=True):
        np.testing.assert_array_equal(first.tokens, second.tokens)


async def test_an_engine_of_two_ranks_counts_its_steps_and_batch(divided: SamplerPool) -> None:
    async with asyncio.timeout(30):
        while (use := await divided.engine_use()) is None or use.batch is None:  # noqa: ASYNC110 - it is busy
            await asyncio.sleep(0.1)
    assert use.batch.running == 0


async def test_an_adapter_that_ranks_cannot_load_fails_by_name_and_nothing_else(
    divided: SamplerPool, reference: Reference, adapter: Path, tmp_path: Path
) -> None:
    """Every rank fails; their answers must not be taken for those to the next calls."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in adapter.iterdir():  # noqa: ASYNC240
        (broken / file.name).write_bytes(file.read_bytes())
    config = broken / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 4096'))
    host = divided.engines[0].supervisor.children[0].process.pid
    for number in range(3):
        with pytest.raises(BackendFailed, match="the sampler cannot load these weights"):
            await divided.publish(broken, "bad")
        await asyncio.sleep(0.2)  # it is evicted by then, by a call of its own
        fresh = await asyncio.to_thread(shutil.copytree, adapter, tmp_path / f"adapter-{number}")
        response = await sample(divided, scoring(MIXED["one image"]), fresh)
        assert response.prompt_logprobs is not None
        assert_close(response.prompt_logprobs, reference.prompt_logprobs(MIXED["one image"], "small"))
    assert divided.engines[0].supervisor.children[0].process.pid == host


async def test_a_killed_rank_ends_its_engine_which_starts_again(divided: SamplerPool, adapter: Path) -> None:
    host = psutil.Process(divided.engines[0].supervisor.children[0].process.pid)
    ranks = [one for one in host.children(recursive=True) if "Worker" in one.name()]
    assert len(ranks) == 2
    long = request(MIXED["text"], {"max_tokens": 1000, "stop": []})
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        asked = group.create_task(sample(divided, long, adapter))
        await asyncio.sleep(0.3)
        ranks[1].kill()
    assert len(asked.result().sequences[0].tokens) == 1000
    host.wait(30)  # it ends beside the start of the next, which is a fork here, and quick
