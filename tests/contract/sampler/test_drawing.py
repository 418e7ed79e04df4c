"""Sampled tokens, and the ends of samples."""

import asyncio
import json
import secrets

import pytest
from transformers import AutoTokenizer

from tests.factories import MIXED, prompt, words
from tests.sampling import (
    drawn,
    request,
    sample,
)
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_temperature_zero_takes_the_likeliest_token(sampler, reference):
    sequence = await drawn(sampler, MIXED["text"], {"temperature": 0})
    logprobs_TV = reference.logprobs_TV(MIXED["text"], sequence.tokens, None)
    assert sequence.tokens.tolist() == logprobs_TV[-9:-1].argmax(-1).tolist()


async def test_the_same_seed_gives_the_same_tokens_and_its_samples_differ(sampler):
    def seeded(seed: int) -> SampleRequest:
        return request(MIXED["one image"], {"seed": seed}, num_samples=4)

    first, second, other, huge = await asyncio.gather(
        *(sample(sampler, seeded(seed), None) for seed in (7, 7, 8, 2**64 - 1))
    )
    texts = [[one.tokens.tolist() for one in response.sequences] for response in (first, second, other, huge)]
    assert texts[0] == texts[1]
    assert len({str(tokens) for tokens in texts[0]}) == 4
    assert texts[0] != texts[2]


async def test_seeded_prompts_that_a_step_cuts_leave_the_engine_alive_and_sample_the_same(sampler):
    """A step of the engine has 4096 tokens."""
    asked = [request(prompt(words(1000, 50 + n)), {"seed": n, "max_tokens": 5, "stop": []}) for n in range(9)]
    together = await asyncio.gather(*(sample(sampler, one, None) for one in asked))
    alone = [await sample(sampler, one, None) for one in asked]
    for one, other in zip(together, alone, strict=True):
        assert one.sequences[0].tokens.tolist() == other.sequences[0].tokens.tolist()
    assert [process.restarts for process in sampler.processes()] == [0]


async def test_without_a_seed_samples_differ(sampler):
    responses = await asyncio.gather(*(sample(sampler, request(MIXED["text"], num_samples=3), None) for _ in range(2)))
    assert len({str(one.tokens.tolist()) for response in responses for one in response.sequences}) == 6


async def test_a_repeated_prompt_is_found_in_the_cache(sampler):
    model_input = prompt(words(300, secrets.randbits(32)))  # a failed attempt leaves its own in the cache
    first = await sample(sampler, request(model_input), None)
    second = await sample(sampler, request(model_input), None)
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, 256)


LONG = {"seed": 3, "max_tokens": 400}


async def test_without_stop_the_models_end_tokens_stop_and_stay(sampler, tiny_vl):
    """And with an empty stop nothing does: the same tokens, and more."""
    ends = set(json.loads((tiny_vl / "generation_config.json").read_text())["eos_token_id"])
    assert len(ends) == 2
    ended, free = await asyncio.gather(
        sample(sampler, request(MIXED["text"], LONG, num_samples=16), None),
        sample(sampler, request(MIXED["text"], LONG | {"stop": []}, num_samples=16), None),
    )
    seen = set()
    for one, whole in zip(ended.sequences, free.sequences, strict=True):
        assert one.tokens.tolist() == whole.tokens[: len(one.tokens)].tolist()
        assert (whole.stop_reason, len(whole.tokens)) == ("length", 400)
        assert not ends & set(one.tokens[:-1].tolist())
        if one.stop_reason == "stop":
            seen.add(int(one.tokens[-1]))
    assert seen == ends


@pytest.fixture(scope="module")
def ends(tiny_vl) -> set[int]:
    return set(json.loads((tiny_vl / "generation_config.json").read_text())["eos_token_id"])


async def texts(sampler: SamplerPool, stop: object) -> list[list[int]]:
    response = await sample(sampler, request(MIXED["text"], LONG | {"stop": stop}, num_samples=16), None)
    return [one.tokens.tolist() for one in response.sequences]


def until(tokens: list[int], stops: set[int]) -> list[int]:
    first = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: first + 1]


async def test_stop_tokens_stop_beside_the_models_end_tokens_and_stay(sampler, ends):
    free = await texts(sampler, [])
    wanted = [next(token for token in free[0][20:] if token not in ends), free[1][300]]
    expected = [until(tokens, ends | set(wanted)) for tokens in free]
    assert {tokens[-1] for tokens in expected} > set(wanted)  # and an end token
    assert await texts(sampler, wanted) == expected


async def test_a_stop_string_that_never_comes_leaves_the_models_end_tokens(sampler, ends):
    free = await texts(sampler, [])
    expected = [until(tokens, ends) for tokens in free]
    assert expected != free
    for stop in ("never seen in any text", ["never seen", "in any text"]):
        assert await texts(sampler, stop) == expected


@pytest.mark.parametrize("form", [str, list])
async def test_a_stop_string_stops_and_its_tokens_stay(sampler, tiny_vl, form):
    """Also one that spans tokens, special ones among them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_vl)
    free = (await drawn(sampler, MIXED["text"], LONG | {"stop": []})).tokens.tolist()
    at = next(i for i, token in enumerate(free) if i > 5 and token in tokenizer.all_special_ids)
    stop = tokenizer.decode([free[at]])
    sequence = await drawn(sampler, MIXED["text"], LONG | {"stop": stop if form is str else ["never seen", stop]})
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == free[: free.index(free[at]) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)

    ascii_at = next(i for i in range(20, 300) if tokenizer.decode(free[i : i + 2]).isascii())
    pair = tokenizer.decode(free[ascii_at : ascii_at + 2])
    sequence = await drawn(sampler, MIXED["text"], LONG | {"stop": pair if form is str else [pair]})
    assert sequence.stop_reason == "stop"
    assert pair in tokenizer.decode(sequence.tokens.tolist())
    assert pair not in tokenizer.decode(sequence.tokens.tolist()[:-1])


async def test_without_max_tokens_a_sample_runs_to_the_context_limit(sampler):
    sequence = await drawn(sampler, prompt(words(3000)), {"max_tokens": None, "stop": []})
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 1096)
