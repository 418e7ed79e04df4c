"""One owner's weights affect no other owner."""

import asyncio
import base64
import secrets
from typing import Any

import numpy as np
import pytest

from tests.factories import MIXED, photo, prompt, words
from tests.sampling import (
    OVERFLOWING,
    assert_close,
    assert_draws_fail_alone,
    assert_no_placeholder_is_drawn,
    request,
    sample,
    scoring,
    spoilt,
)
from tinker_server.backends.protocol import ChatTask, InvalidInput

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_an_adapter_that_diverged_leaves_nothing_in_the_cache_for_others(sampler, reference, adapters, tmp_path):
    """Its values are finite, and overflow in the model. The prompts fill the whole KV cache."""
    diverged = spoilt(reference, tmp_path / "diverged", OVERFLOWING)
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
    await assert_draws_fail_alone(sampler, reference, tmp_path, adapters["small"])


async def test_image_placeholders_are_never_drawn_however_likely(sampler, renderer, tmp_path):
    await assert_no_placeholder_is_drawn(sampler, renderer, tmp_path / "a")
