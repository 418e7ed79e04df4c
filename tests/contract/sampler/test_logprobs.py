"""Log probabilities of the sampler against plain transformers and PEFT, in float32 on the CPU.

pytest tests/contract/sampler
"""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.factories import MIXED, make_renderer, present, prompt, twins, words
from tests.sampling import (
    ADJACENT,
    ATOL,
    Reference,
    assert_close,
    assert_sequence_close,
    drawn,
    request,
    sample,
    scoring,
    targets,
)
from tinker_server.api_schemas.inputs import ModelInput, TensorData

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("name", [*MIXED, "adjacent images"])
async def test_prompt_and_sample_logprobs_are_those_of_transformers(sampler, reference, name):
    model_input = MIXED.get(name, ADJACENT)
    response = await sample(sampler, request(model_input, prompt_logprobs=True), None)
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(model_input))
    assert_sequence_close(response, reference, model_input, None)


async def test_photographs_whose_files_begin_and_end_alike_are_two_images(sampler, tiny_vl):
    """For the caches of pixels, of features and of prefixes: each is scored as transformers scores it alone."""
    inputs = [prompt(words(100, 1), one, words(60, 2)) for one in twins(96, 64)]
    references = [Reference(tiny_vl, make_renderer(tiny_vl), {"small": 4}) for _ in inputs]
    wanted = [one.prompt_logprobs(model_input) for one, model_input in zip(references, inputs, strict=True)]
    assert np.nanmax(np.abs(wanted[0] - wanted[1])) > 100 * ATOL
    for model_input, expected, alone in zip(inputs, wanted, references, strict=True):
        scored = await sample(sampler, request(model_input, prompt_logprobs=True), None)
        assert_close(scored.prompt_logprobs, expected)
        for _ in range(2):
            response = await sample(sampler, request(model_input), None)
            assert_sequence_close(response, alone, model_input, None)
        assert response.prompt_cache_hit_tokens >= 128, "the block with the image was taken from the cache"


async def test_temperature_scales_logprobs_of_samples_but_not_of_the_prompt(sampler, reference, adapters):
    model_input = MIXED["one image"]
    response = await sample(
        sampler, request(model_input, {"temperature": 0.5}, prompt_logprobs=True), adapters["small"]
    )
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(model_input, "small"))
    assert_sequence_close(response, reference, model_input, "small", temperature=0.5)


async def test_samples_of_five_adapters_and_the_base_at_once_are_those_of_peft(sampler, reference, adapters):
    async def one(name: str | None, model_input: ModelInput, seed: int) -> None:
        response = await sample(sampler, request(model_input, {"max_tokens": 12 + seed}), adapters[name])
        assert_sequence_close(response, reference, model_input, name)

    inputs = [*MIXED.values(), ADJACENT]
    await asyncio.gather(
        *(one(name, model_input, index) for index, model_input in enumerate(inputs) for name in adapters)
    )


async def test_two_hundred_prompts_scored_at_once_are_those_of_peft(sampler, reference, adapters):
    """Six weights, several steps' worth of tokens so that prompts are cut between steps, samples in between."""
    names = list(adapters)
    random = np.random.default_rng(0)
    inputs = [prompt(words(int(random.integers(2, 60)), seed)) for seed in range(197)]
    inputs += [MIXED["three images of different sizes"], ADJACENT, prompt(words(2500, 7))]
    works = [sample(sampler, scoring(one), adapters[names[i % 6]]) for i, one in enumerate(inputs)]
    drawing = [request(prompt(words(9, i)), {"max_tokens": 40}) for i in range(12)]
    works += [sample(sampler, one, adapters[names[i % 6]]) for i, one in enumerate(drawing)]
    responses = await asyncio.gather(*works)
    for i, model_input in enumerate(inputs):
        assert_close(responses[i].prompt_logprobs, reference.prompt_logprobs(model_input, names[i % 6]))
    for i, (one, response) in enumerate(zip(drawing, responses[len(inputs) :], strict=True)):
        assert_sequence_close(response, reference, one.prompt, names[i % 6])


async def test_top_k_and_top_p_shut_out_unlikely_tokens_and_renormalise(sampler, reference):
    model_input = MIXED["text"]
    logprobs_V = reference.logprobs_TV(model_input, [], None)[-1].double().numpy()
    order = np.argsort(-logprobs_V)
    nucleus = order[: int(np.searchsorted(np.exp(logprobs_V[order]).cumsum(), 0.4)) + 1]
    for params, allowed in (({"top_k": 3}, order[:3]), ({"top_p": 0.4}, nucleus)):
        response = await sample(
            sampler, request(model_input, {"max_tokens": 1, "seed": 1, **params}, num_samples=64), None
        )
        normaliser = np.logaddexp.reduce(logprobs_V[allowed])
        drawn_tokens = {int(one.tokens[0]) for one in response.sequences}
        assert len(drawn_tokens) > 1
        assert drawn_tokens <= set(allowed.tolist())
        for one in response.sequences:
            assert one.logprobs[0] == pytest.approx(logprobs_V[one.tokens[0]] - normaliser, abs=ATOL)


async def test_topk_tables_hold_the_likeliest_tokens_in_order_and_nothing_at_images(
    sampler, renderer, reference, adapters
):
    model_input = MIXED["one image"]
    response = await sample(
        sampler,
        request(model_input, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=5),
        adapters["large"],
    )
    sequence, length = response.sequences[0], len(present(response.prompt_logprobs))
    logprobs, token_ids = reference.logprobs_TV(model_input, sequence.tokens, "large").topk(5)
    table = response.topk_prompt_logprobs
    (span,) = renderer.render(model_input, "prompt").spans
    for row in (0, *range(span.offset, span.offset + span.num_tokens)):
        assert present(table).token_ids[row].tolist() == [0] * 3
        assert present(table).logprobs[row].tolist() == [-99999.0] * 3
    for row in np.flatnonzero(np.nan_to_num(present(response.prompt_logprobs)) != 0):
        assert_close(present(table).logprobs[row], logprobs[row - 1, :3].numpy())
        assert present(table).token_ids[row].tolist() == token_ids[row - 1, :3].tolist()
    assert_close(present(sequence.topk_logprobs).logprobs, logprobs[length - 1 : -1].numpy())
    assert present(sequence.topk_logprobs).token_ids.dtype == np.int32


async def test_chosen_tokens_are_scored_beside_all_else_the_prompt_is_asked_for(sampler, reference, adapters):
    """Prompts of several weights at once, one of them split between steps."""
    names = list(adapters)
    inputs = [MIXED["text"], MIXED["one image"], prompt(words(5, 1)), prompt(words(2500, 7))]
    works, tables = [], []
    for index, model_input in enumerate(inputs):
        logprobs_TV = reference.logprobs_TV(model_input, [], names[index])[:-1].numpy()
        ids = np.random.default_rng(index).integers(-1, 300, (len(logprobs_TV), 3))
        tables.append((logprobs_TV, ids))
        fields = {"topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2, "prompt_logprobs": True}
        one = request(model_input, {"max_tokens": 2}, target_prompt_logprobs=targets(ids), num_samples=2, **fields)
        works.append(sample(sampler, one, adapters[names[index]]))
    for model_input, name, response, (logprobs_TV, ids) in zip(
        inputs, names, await asyncio.gather(*works), tables, strict=False
    ):
        rows = np.arange(len(ids))[:, None]
        expected = np.where(ids >= 0, logprobs_TV[rows, np.maximum(ids, 0)], 0)
        chosen = response.target_prompt_logprobs
        assert present(chosen).shape == list(ids.shape) and present(chosen).crow_indices is None
        np.testing.assert_allclose(present(chosen).values, expected, atol=ATOL)
        drawn = response.prompt_alt_tokens
        np.testing.assert_allclose(present(drawn).logprobs, logprobs_TV[rows, present(drawn).tokens], atol=ATOL)
        assert_close(response.prompt_logprobs, reference.prompt_logprobs(model_input, name))
        assert present(response.topk_prompt_logprobs).token_ids.shape == (len(ids) + 1, 2)
        assert len(response.sequences) == 2


async def test_chosen_tokens_in_sparse_tensors_come_back_in_sparse_tensors(sampler, reference):
    model_input = prompt(words(4, 1))
    asked = TensorData(
        data=[7, -1, 9], dtype="int64", shape=[3, 5], sparse_crow_indices=[0, 2, 2, 3], sparse_col_indices=[0, 3, 4]
    )
    response = await sample(sampler, request(model_input, target_prompt_logprobs=asked), None)
    logprobs_TV = reference.logprobs_TV(model_input, [], None).numpy()
    chosen = present(response.target_prompt_logprobs)
    np.testing.assert_allclose(chosen.values, [logprobs_TV[0, 7], 0, logprobs_TV[2, 9]], atol=ATOL)
    rows, columns = present(chosen.crow_indices), present(chosen.col_indices)
    assert (rows.tolist(), columns.tolist()) == ([0, 2, 2, 3], [0, 3, 4])
    assert response.prompt_logprobs is None and response.topk_prompt_logprobs is None


async def test_draws_at_prompt_positions_follow_the_scaled_distribution(sampler, renderer, reference, adapters):
    """Without the placeholders of images, which no client may send."""
    model_input, k = prompt(words(60, 3)), 100
    scaled_TV = reference.logprobs_TV(model_input, [], "small", temperature=0.5)[:-1].double()
    scaled_TV[:, sorted(renderer.family.placeholders)] = -100.0  # minus infinity, for the sums below
    scaled_TV = scaled_TV.log_softmax(-1).numpy()
    fields: dict[str, Any] = {"params": {"temperature": 0.5, "seed": 3}, "prompt_alt_tokens_k": k}
    first, again = [await sample(sampler, request(model_input, **fields), adapters["small"]) for _ in range(2)]
    tokens = present(first.prompt_alt_tokens).tokens
    assert tokens.shape == (59, k) and (tokens == present(again.prompt_alt_tokens).tokens).all()
    # The mean log probability of draws is minus the entropy, up to the error of a mean.
    drawn = np.take_along_axis(scaled_TV, tokens, axis=1)
    entropy_T = -(np.exp(scaled_TV) * scaled_TV).sum(-1)
    variance_T = (np.exp(scaled_TV) * (scaled_TV + entropy_T[:, None]) ** 2).sum(-1)
    assert abs(drawn.mean() + entropy_T.mean()) < 4 * np.sqrt(variance_T.mean() / drawn.size)
    greedy = await sample(sampler, request(model_input, {"temperature": 0}, prompt_alt_tokens_k=2), adapters["small"])
    assert (present(greedy.prompt_alt_tokens).tokens == scaled_TV.argmax(-1)[:, None]).all()


async def test_a_greedy_sample_has_the_models_own_log_probabilities_whatever_cuts_are_asked_for(sampler):
    """The engine ignores top_k and top_p at temperature 0."""
    plain, *cut = [
        (await sample(sampler, request(MIXED["text"], {"temperature": 0, "max_tokens": 6, **more}), None)).sequences[0]
        for more in ({}, {"top_p": 0.5}, {"top_k": 3})
    ]
    for one in cut:
        assert one.tokens.tolist() == plain.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, plain.logprobs, atol=1e-5)


async def test_last_n_leaves_everything_before_it_undefined(sampler, reference):
    model_input = MIXED["image last"]
    response = await sample(sampler, request(model_input, prompt_logprobs=True, prompt_logprobs_last_n=3), None)
    expected = reference.prompt_logprobs(model_input)
    expected[:-3] = np.nan
    assert_close(response.prompt_logprobs, expected)


async def test_cells_that_top_k_leaves_empty_hold_the_sentinel(sampler):
    sequence = await drawn(sampler, MIXED["text"], {"top_k": 2}, topk_sample_logprobs=4)
    assert (present(sequence.topk_logprobs).logprobs[:, 2:] == -99999.0).all()
    assert (present(sequence.topk_logprobs).token_ids[:, 2:] == 0).all()
    assert (present(sequence.topk_logprobs).logprobs[:, :2] > -99999.0).all()
