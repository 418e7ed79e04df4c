"""One owner's weights affect no other owner."""

import asyncio
import base64
import secrets
from typing import Any

import numpy as np
import pytest
import torch

from api_schemas.training import Trainable
from backends.protocol import ChatTask, InvalidInput
from backends.trainer.checkpoint_files import write_adapter, write_directory
from tests.factories import MIXED, photo, prompt, words
from tests.sampling import assert_close, request, sample, scoring, spoilt

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_an_adapter_that_diverged_leaves_nothing_in_the_cache_for_others(sampler, reference, adapters, tmp_path):
    """Its values are finite, and overflow in the model. The prompts fill the whole KV cache."""
    diverged = spoilt(reference, tmp_path / "diverged", 1e30)
    inputs = [prompt(words(40, i)) for i in range(40)]

    async def scores(name: str | None) -> list[np.ndarray | None]:
        works = [scoring(one) for one in inputs]
        responses = await asyncio.gather(*(sample(sampler, one, adapters[name]) for one in works))
        return [one.prompt_logprobs for one in responses]

    before = {name: await scores(name) for name in (None, "small")}
    for start in range(0, 40, 8):
        long = [request(prompt(words(2000, 1000 + start + i)), {"max_tokens": 4}) for i in range(8)]
        answers = await asyncio.gather(*(sample(sampler, one, diverged) for one in long), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, InvalidInput), answer
            assert "not finite" in str(answer)
    for name, expected in before.items():
        for got, wanted in zip(await scores(name), expected, strict=True):
            assert got is not None and wanted is not None
            assert_close(got, wanted)
        drawn = await sample(sampler, request(MIXED["text"], {"max_tokens": 40}, num_samples=40), adapters[name])
        assert all(np.isfinite(one.logprobs).all() for one in drawn.sequences)


@pytest.mark.parametrize("messages", [["hello world " * 60], ["small corpus " * 60, "image"]], ids=["text", "image"])
async def test_the_prefix_cache_reveals_no_prompt_of_another_owner(sampler, messages):
    """A prompt found there shows in the usage, and is answered sooner."""
    unseen = secrets.token_hex(8)  # a failed attempt leaves its prompt in the cache
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{unseen} {messages[0]}"}]
    if len(messages) > 1:
        url = f"data:image/png;base64,{base64.b64encode(photo(96, 64, 77)).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}

    async def cached(owner: str) -> int:
        num_cached: int = (await sampler.chat(ChatTask("chat_completions", body, None, owner), lambda _: None)).cached
        return num_cached

    first = await cached("one")
    assert await cached("one") > first + 50
    assert await cached("another") == first == 0
    assert await cached("another") > 50


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_weights_that_are_not_finite_are_refused_by_name(sampler, reference, tmp_path, value):
    with pytest.raises(InvalidInput, match=r"lora_B.* holds values that are not finite"):
        await sample(sampler, request(MIXED["text"]), spoilt(reference, tmp_path / "bad", value))


async def test_draws_from_scores_that_are_not_finite_fail_alone(sampler, reference, adapters, tmp_path):
    diverged = spoilt(reference, tmp_path / "diverged", 1e30)
    process = sampler.engines[0].supervisor.children
    beside = asyncio.create_task(
        sample(sampler, request(MIXED["text"], {"max_tokens": 300, "stop": []}), adapters["small"])
    )
    for fields in ({"prompt_alt_tokens_k": 2}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 3}):
        with pytest.raises(InvalidInput, match="not finite"):
            await sample(sampler, request(MIXED["one image"], {"seed": 1}, **fields), diverged)
    assert len((await beside).sequences[0].tokens) == 300
    assert sampler.engines[0].supervisor.children is process


async def test_image_placeholders_are_never_drawn_however_likely(sampler, renderer, tmp_path):
    """At every position one of the two is favoured by far: their rows of the head point in opposite directions."""
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
        assert all(np.isfinite(one.logprobs).all() for one in response.sequences)
        if "top_k" not in params and "top_p" not in params:  # of the whole distribution, which the two dominate
            assert np.mean([one.logprobs.mean() for one in response.sequences]) < -3
        else:
            assert np.mean([one.logprobs.mean() for one in response.sequences]) > -3
