"""Images whose tokens see each other (Gemma 3), in the engine's steps and in its prefix cache.

pytest tests/contract/sampler/test_whole_images.py
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from api_schemas.inputs import Datum, ImageChunk, ModelInput
from api_schemas.sampling import SampleResponse
from backends.sampler.pool import SamplerPool
from tests.factories import image, make_renderer, prompt, words
from tests.models import make_tiny_gemma3
from tests.sampling import ATOL, request, sample, sampler_config
from tests.trainers import LORA, logprobs, trainer

pytestmark = pytest.mark.asyncio(loop_scope="package")
BLOCK = 128
"""Tokens of a block of the prefix cache."""


def with_drawn(model_input: ModelInput, response: SampleResponse) -> ModelInput:
    (drawn,) = response.sequences
    tokens = words(1).model_copy(update={"tokens": np.array(drawn.tokens, np.int32)})
    return model_input.model_copy(update={"chunks": [*model_input.chunks, tokens]})


async def test_no_step_and_no_cached_prefix_cuts_an_image(tmp_path: Path) -> None:
    """Images at the beginning of prompts, for which long texts leave little of a step's 4,096 tokens; and a prompt
    whose first block ends within an image, twice."""
    source = make_tiny_gemma3(tmp_path / "model")
    renderer, rank = make_renderer(source), trainer(source)
    rank.create_model("fresh", LORA)  # adds nothing
    texts = [prompt(words(4060 - 5 * number, number)) for number in range(6)]
    shown = [prompt(image(64, 64, number % 3), words(3, number)) for number in range(90)]
    cut = prompt(words(BLOCK - 10, 1), image(64, 64, 1), image(96, 64, 2), words(5, 2))
    first = renderer.render(cut, "prompt").spans[0]
    assert first.offset + 4 < BLOCK < first.offset + first.num_tokens - 4
    running = SamplerPool(sampler_config(source, tmp_path / "scratch"))
    await running.start()
    try:
        mixed = [one for number, text in enumerate(texts) for one in (text, *shown[15 * number : 15 * number + 15])]
        asked = [request(one, {"max_tokens": 2, "stop": []}) for one in [*mixed, cut]]
        answers = await asyncio.gather(*(sample(running, one, None) for one in asked))
        again = await sample(running, asked[-1], None)
    finally:
        await running.stop()
    assert again.prompt_cache_hit_tokens == BLOCK
    with_images = [
        (model_input, answer)
        for model_input, answer in zip([*mixed, cut, cut], [*answers, again], strict=True)
        if any(isinstance(chunk, ImageChunk) for chunk in model_input.chunks)
    ]
    assert len(with_images) == len(shown) + 2
    for model_input, answer in with_images:
        whole = with_drawn(model_input, answer)
        ids = renderer.render(whole, "datum").token_ids_T
        targets = {"target_tokens": np.append(ids[1:], 0), "weights": np.ones(len(ids), np.float32)}
        (expected,) = logprobs(rank, [Datum(model_input=whole, loss_fn_inputs=targets)], "fresh")
        (drawn,) = answer.sequences
        np.testing.assert_allclose(drawn.logprobs, expected[-3:-1], atol=ATOL)
