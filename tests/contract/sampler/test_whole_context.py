"""Prompts as long as the context: whoever scores one gets the trainer's scores, as for every shorter one.

pytest tests/contract/sampler/test_whole_context.py
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines import fork_sampler
from tests.factories import image, make_renderer, present, prompt, words
from tests.models import make_tiny_of
from tests.sampling import Reference, assert_close, request, sample, sampler_config, scoring
from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.checks import check_sample
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = pytest.mark.asyncio(loop_scope="package")

CONTEXT = 4096
"""Also the most positions of the tiny model."""
ORIGINAL = 64


def filled(length: int, seed: int, *images: tuple[int, int]) -> ModelInput:
    """A prompt of so many tokens that ends with images, of which 32 x 32 pixels are a token."""
    num_tokens = sum(width * height // 1024 for width, height in images)
    return prompt(words(length - num_tokens, seed), *(image(*size, seed) for size in images))


async def test_scores_of_a_whole_context_are_those_of_transformers(sampler, reference, adapters, renderer):
    inputs = [filled(CONTEXT - 1, 1), filled(CONTEXT, 2), filled(CONTEXT, 3, (96, 64)), filled(CONTEXT, 4)]
    for one in inputs:
        size = check_sample(renderer, scoring(one), CONTEXT, max_images=8)
        assert size.num_tokens == CONTEXT - (one is inputs[0])
    names = ["small", None, "small", "large"]
    works = [sample(sampler, scoring(one), adapters[name]) for one, name in zip(inputs, names, strict=True)]
    for one, name, response in zip(inputs, names, await asyncio.gather(*works), strict=True):
        assert_close(response.prompt_logprobs, reference.prompt_logprobs(one, name))
        assert len(response.sequences[0].tokens) == 1
    # In the prefix cache now; and every other kind of score.
    kinds = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2, "prompt_logprobs_last_n": 5}
    again = request(inputs[1], {"max_tokens": None}, **kinds)
    check_sample(renderer, again, CONTEXT, max_images=8)
    response = await sample(sampler, again, None)
    assert_close(present(response.prompt_logprobs)[-5:], reference.prompt_logprobs(inputs[1])[-5:])
    assert present(response.topk_prompt_logprobs).token_ids.shape == (CONTEXT, 2)


@pytest.mark.parametrize(
    ("length", "asked"),
    [
        (CONTEXT + 1, {"prompt_logprobs": True, "params": {"max_tokens": 1}}),
        (CONTEXT, {"prompt_logprobs": True, "params": {"max_tokens": 2}}),
        (CONTEXT, {"params": {"max_tokens": 1}}),
    ],
)
async def test_what_is_sampled_must_fit_into_the_context(renderer: Renderer, length, asked):
    with pytest.raises(InvalidInput, match=f"exceeds the model's context window: {length} \\+ . > {CONTEXT}"):
        check_sample(renderer, request(filled(length, 1), **asked), CONTEXT, max_images=8)


async def test_an_answer_without_a_limit_ends_with_the_context(sampler):
    response = await sample(sampler, request(filled(CONTEXT - 6, 1), {"max_tokens": None, "stop": []}), None)
    assert len(response.sequences[0].tokens) == 6


async def test_a_model_with_longer_frequencies_beyond_the_context_keeps_the_shorter(tmp_path: Path) -> None:
    """Of longrope, whose frequencies the engine chooses by its longest sequence."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    source = make_tiny_of("llama", tmp_path / "model", rope_parameters=rope | factors, max_position_embeddings=128)
    spec = replace(sampler_config(source, tmp_path / "scratch"), max_context_length=ORIGINAL, takes_images=False)
    running = SamplerPool(spec, fork_sampler)
    await running.start()
    try:
        response = await sample(running, scoring(filled(ORIGINAL, 1)), None)
    finally:
        await running.stop()
    reference = Reference(source, make_renderer(source), {"small": 4})
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(filled(ORIGINAL, 1)))
