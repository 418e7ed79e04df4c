"""Images whose tokens see each other (Gemma 3) in the engine's prefix cache.

pytest tests/contract/sampler/test_whole_images.py
"""

from pathlib import Path

import numpy as np
import pytest

from tests.factories import image, make_renderer, prompt, words
from tests.models import make_tiny_gemma3
from tests.sampling import ATOL, request, sample, sampler_config
from tests.trainers import LORA, logprobs, trainer
from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = pytest.mark.asyncio(loop_scope="package")
BLOCK = 128
"""Tokens of a block of the prefix cache."""


async def test_tokens_behind_a_cached_prefix_that_ends_within_an_image_see_all_of_it(tmp_path: Path) -> None:
    source = make_tiny_gemma3(tmp_path / "model")
    renderer, rank = make_renderer(source), trainer(source)
    rank.create_model("fresh", LORA)  # adds nothing
    cut = prompt(words(BLOCK - 10, 1), image(64, 64, 1), image(96, 64, 2), words(5, 2))
    first = renderer.render(cut, "prompt").spans[0]
    assert first.offset + 4 < BLOCK < first.offset + first.num_tokens - 4
    running = SamplerPool(sampler_config(source, tmp_path / "scratch"))
    await running.start()
    try:
        answers = [await sample(running, request(cut, {"max_tokens": 2, "stop": []}), None) for _ in range(2)]
    finally:
        await running.stop()
    assert [one.prompt_cache_hit_tokens for one in answers] == [0, BLOCK]
    for answer in answers:
        (drawn,) = answer.sequences
        tokens = words(1).model_copy(update={"tokens": np.array(drawn.tokens, np.int32)})
        whole = cut.model_copy(update={"chunks": [*cut.chunks, tokens]})
        ids = renderer.render(whole, "datum").token_ids_T
        targets = {"target_tokens": np.append(ids[1:], 0), "weights": np.ones(len(ids), np.float32)}
        (expected,) = logprobs(rank, [Datum(model_input=whole, loss_fn_inputs=targets)], "fresh")
        np.testing.assert_allclose(drawn.logprobs, expected[-3:-1], atol=ATOL)
