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

from api_schemas.training import Trainable
from backends.formats.model_files import kv_bytes_per_token
from backends.inputs.rendering import Renderer
from backends.model_spec import Placement
from backends.protocol import InvalidInput
from backends.sampler.pool import SamplerPool
from backends.trainer.checkpoint_files import write_adapter, write_directory
from tests.factories import MIXED, prompt, words
from tests.sampling import RANKS, Reference, request, sample, sampler_config, scoring

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


def spoilt(reference: Reference, directory: Path) -> Path:
    """The adapter `small` with every lora_B 1e30: finite, also in bfloat16, and too large for any product."""
    tensors = {name: tensor.detach().clone() for name, tensor in reference.tensors("small").items()}
    for name in tensors:
        if "lora_B" in name:
            tensors[name].fill_(1e30)
    write_directory(directory, lambda at: write_adapter(at, tensors, Trainable(rank=4, seed=0), "base"))
    return directory


async def test_a_diverged_adapter_leaves_nothing_in_the_cache_for_others(sampler, reference, renderer, tmp_path):
    """The prompts fill the whole cache."""
    diverged = spoilt(reference, tmp_path / "diverged")
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
    diverged = spoilt(reference, tmp_path / "diverged")
    process = sampler.engines[0].supervisor.children
    for fields in ({"prompt_alt_tokens_k": 2}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 3}):
        with pytest.raises(InvalidInput, match="not finite"):
            await sample(sampler, request(MIXED["one image"], {"seed": 1}, **fields), diverged)
    assert sampler.engines[0].supervisor.children is process


async def test_image_placeholders_are_never_drawn_however_likely(sampler, renderer, tmp_path):
    config = renderer.config
    direction = torch.ones(1, config.get_text_config().hidden_size)
    rows = torch.zeros(config.get_text_config().vocab_size, 2)
    rows[config.image_token_id, 0] = rows[config.video_token_id, 1] = 1.0
    tensors = {
        "base_model.model.lm_head.lora_A.weight": torch.cat([direction, -direction]),
        "base_model.model.lm_head.lora_B.weight": rows,
    }
    write_directory(tmp_path / "a", lambda at: write_adapter(at, tensors, Trainable(rank=2, seed=0), "base"))
    for params in ({}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.2}):
        one = request(MIXED["one image"], {"max_tokens": 40, "stop": []} | params, num_samples=8)
        response = await sample(sampler, one, tmp_path / "a")
        tokens = np.concatenate([one.tokens for one in response.sequences])
        assert not set(tokens.tolist()) & {config.image_token_id, config.video_token_id}, params
        mean = np.mean([one.logprobs.mean() for one in response.sequences])
        assert np.isfinite(mean)
        assert (mean > -3) == ("top_k" in params or "top_p" in params)  # else of the whole distribution
