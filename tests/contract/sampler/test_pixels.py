"""An image's pixels go into the engine's process once, not once for each sequence; forgotten ones go again."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.factories import MIXED, image, prompt, words
from tests.sampling import assert_close, request, sampler_config
from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.backends.protocol import SamplingTask
from tinker_server.backends.sampler.engine.process import SamplerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerProcess]:
    """In this process, its engine in another."""
    environment = pytest.MonkeyPatch()
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("TORCH_COMPILE_DISABLE", "1"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1"),  # as the launcher sets it
    ):
        environment.setenv(name, value)
    config = replace(sampler_config(tiny_vl, tmp_path_factory.mktemp("scratch")), image_cache_bytes=4 << 20)
    running = await SamplerProcess.start(config)
    yield running
    running._engine.shutdown()
    environment.undo()


@pytest.fixture
def sent(process: SamplerProcess, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hashes of the images whose pixels went to the engine."""
    hashes: list[str] = []
    add = process._engine.engine_core.add_request_async

    async def noted(request: Any) -> None:
        hashes.extend(one.mm_hash for one in request.mm_features or () if one.data is not None)
        await add(request)

    monkeypatch.setattr(process._engine.engine_core, "add_request_async", noted)
    return hashes


async def scores(process: SamplerProcess, model_input: ModelInput, num_samples: int = 1) -> np.ndarray | None:
    asked = request(model_input, {"max_tokens": 4}, prompt_logprobs=True, num_samples=num_samples)
    response = await process.sample(SamplingTask.from_request(asked, None, "somebody"))
    assert len(response.sequences) == num_samples
    return response.prompt_logprobs


async def test_pixels_are_sent_once_however_many_sequences_and_prompts_see_them(process, sent, reference):
    seen = MIXED["three images of different sizes"]
    first, _, last = (chunk for chunk in seen.chunks if isinstance(chunk, ImageChunk))
    again = prompt(words(5), last, words(2), first)
    got = await scores(process, seen, num_samples=8)
    others = await asyncio.gather(*(scores(process, again, num_samples=4) for _ in range(4)))
    assert len(sent) == len(set(sent)) == 3
    assert_close(got, reference.prompt_logprobs(seen))
    for other in others:
        assert_close(other, reference.prompt_logprobs(again))


async def test_pixels_that_the_engine_forgot_are_sent_again(process, sent, reference):
    for name in ("one image", "image last", "image first"):
        await scores(process, MIXED[name])
    sent.clear()
    await process._engine.engine_core.reset_mm_cache_async()
    await process._engine.engine_core.reset_encoder_cache_async()
    names = [*MIXED] * 2
    for name, got in zip(names, await asyncio.gather(*(scores(process, MIXED[one], 3) for one in names)), strict=True):
        assert_close(got, reference.prompt_logprobs(MIXED[name]))
    assert len(set(sent)) == 6


async def test_more_images_than_the_engine_keeps_are_all_seen(process, reference):
    inputs = [prompt(words(3, i), image(256, 192 + 32 * (i % 3), 100 + i), words(4, i)) for i in range(12)]
    for _ in range(2):
        found = await asyncio.gather(*(scores(process, one, 2) for one in inputs))
    for one, got in zip(inputs, found, strict=True):
        assert_close(got, reference.prompt_logprobs(one))
