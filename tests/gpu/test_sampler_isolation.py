"""On CUDA's model runner: a diverged adapter reaches nobody else, and image placeholders are never drawn.

pytest tests/gpu/test_sampler_isolation.py
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from tests.factories import MIXED, prompt, words
from tests.sampling import (
    OVERFLOWING,
    RANKS,
    Reference,
    assert_draws_fail_alone,
    assert_no_placeholder_is_drawn,
    request,
    sample,
    sampler_config,
    scoring,
    spoilt,
)
from tinker_server.backends.formats.model_files import kv_bytes_per_token
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Placement
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

KV_CACHE_BYTES = 32 << 20
LONG = 3900
"""Tokens of a prompt that fills the cache."""
CLOSE = 0.05
"""Nats between two runs of one prompt in bfloat16, in batches of different sizes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerPool]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = sampler_config(tiny_vl, tmp_path_factory.mktemp("scratch"))
    placement = Placement(sampler_fraction=0.1)
    cuda = replace(config, device="cuda", dtype="bfloat16", placement=placement, kv_cache_bytes=KV_CACHE_BYTES)
    running = SamplerPool(cuda)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(scope="module")
def reference(tiny_vl: Path, renderer: Renderer) -> Reference:
    return Reference(tiny_vl, renderer, RANKS)


async def test_a_diverged_adapter_leaves_nothing_in_the_cache_for_others(sampler, reference, renderer, tmp_path):
    """The prompts fill the whole cache."""
    diverged = spoilt(reference, tmp_path / "diverged", OVERFLOWING)
    small = reference.save("small", RANKS["small"], tmp_path / "small")
    inputs = [prompt(words(40, i)) for i in range(40)]

    async def scores(weights: Path | None) -> list[np.ndarray | None]:
        responses = await asyncio.gather(*(sample(sampler, scoring(one), weights) for one in inputs))
        return [one.prompt_logprobs for one in responses]

    before = {weights: await scores(weights) for weights in (None, small)}
    capacity = KV_CACHE_BYTES // kv_bytes_per_token(renderer.config.get_text_config(), "bfloat16")
    long = [request(prompt(words(LONG, 1000 + i)), {"max_tokens": 4}) for i in range(capacity // LONG + 8)]
    answers = await asyncio.gather(*(sample(sampler, one, diverged) for one in long), return_exceptions=True)
    assert all(isinstance(one, InvalidInput) and "not finite" in str(one) for one in answers), answers[0]
    for weights, expected in before.items():
        for got, wanted in zip(await scores(weights), expected, strict=True):
            assert got is not None and wanted is not None
            np.testing.assert_allclose(got[1:], wanted[1:], atol=CLOSE)
        drawn = await sample(sampler, request(MIXED["text"], {"max_tokens": 40}, num_samples=40), weights)
        assert all(np.isfinite(one.logprobs).all() for one in drawn.sequences)


async def test_draws_from_scores_that_are_not_finite_fail_alone(sampler, reference, tmp_path):
    small = reference.save("small", RANKS["small"], tmp_path / "small")
    await assert_draws_fail_alone(sampler, reference, tmp_path, small)


async def test_image_placeholders_are_never_drawn_however_likely(sampler, renderer, tmp_path):
    await assert_no_placeholder_is_drawn(sampler, renderer, tmp_path / "a")
