"""Samples and scores equal those of transformers and the trainer; numbers are the checklist's.

pytest tests/conformance/test_sampling_numbers.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from tests.conformance.reference import Trained
from tests.factories import MIXED, as_text, datum, image, present, prompt, words
from tests.reference import Reference
from tests.servers import MODEL, sdk_datum, sdk_input
from tests.training import batch, logprobs_of, step
from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.backends.inputs.rendering import Renderer

TEXT = MIXED["text"]


@pytest.fixture
def sampler(trained: Trained, reference: Reference) -> tinker.SamplingClient:
    """Samples what `reference` is."""
    reference.take(trained.adapter())
    return trained.client.save_weights_and_get_sampling_client().result()


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
@pytest.mark.parametrize("load", ["load_state", "load_state_with_optimizer"])
def test_062_a_state_that_is_loaded_amid_training_is_loaded_whole(
    trained: Trained, service: tinker.ServiceClient, renderer: Renderer, load: str
) -> None:
    """After steps, with a gradient that waits and while weights are sampled: the model goes on as a new model from the
    state does, and samplers keep the weights that they have."""
    data = batch(renderer)
    path = trained.client.save_state("before").result().path
    step(trained.client, batch(renderer, 1))
    sampler = trained.client.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(sdk_input(TEXT)).result()
    trained.client.forward_backward([sdk_datum(item) for item in batch(renderer, 2)], "cross_entropy").result()
    assert getattr(trained.client, load)(path).result().path == path
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        trained.client.optim_step(types.AdamParams()).result()
    create = "create_training_client_from_state" + load.removeprefix("load_state")
    fresh = getattr(service, create)(path).result()
    for _ in range(2):
        for got, wanted in zip(*(logprobs_of(client, data) for client in (trained.client, fresh)), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        for client in (trained.client, fresh):
            step(client, data)
    assert sampler.compute_logprobs(sdk_input(TEXT)).result() == pytest.approx(scores, abs=1e-5)


def ask(
    sampler: tinker.SamplingClient, n: int = 1, prompt: ModelInput = TEXT, **params: object
) -> tinker.APIFuture[types.SampleResponse]:
    parameters = types.SamplingParams(**{"max_tokens": 8, "stop": [], **params})  # type: ignore[arg-type]
    return sampler.sample(sdk_input(prompt), n, parameters)


def draw(sampler: tinker.SamplingClient, n: int = 1, **asked: object) -> Sequence[types.SampledSequence]:
    return ask(sampler, n, **asked).result().sequences  # type: ignore[arg-type]


def next_logprobs(reference: Reference) -> np.ndarray:
    """[V] of the token after TEXT."""
    return reference.distribution_TV(TEXT)[-1].detach().double().numpy()


def after(tokens: Sequence[int]) -> ModelInput:
    (chunk,) = TEXT.chunks
    return prompt(words(0).model_copy(update={"tokens": np.array([*as_text(chunk).tokens, *tokens], np.int32)}))


def test_070_the_five_forms_of_stop(sampler: tinker.SamplingClient, tiny_vl: Path) -> None:
    """All cut the same draw, and what stops it stays; what is asked for is added to the model's end tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_vl)
    ends = {tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")}
    long: dict[str, Any] = {"max_tokens": 100, "seed": 3}
    forms = [ask(sampler, 24, **long), ask(sampler, 24, **long | {"stop": None})]
    whole, absent = (form.result().sequences for form in forms)
    assert all((len(one.tokens), one.stop_reason) == (100, "length") for one in whole)
    assert any(one.stop_reason == "stop" for one in absent)
    for one, free in zip(absent, whole, strict=True):
        at = next((index for index, token in enumerate(free.tokens) if token in ends), None)
        assert one.tokens == (free.tokens if at is None else free.tokens[: at + 1])
        assert one.stop_reason == ("length" if at is None else "stop")

    which = next(i for i, one in enumerate(whole) if not ends & set(one.tokens))
    drawn = whole[which].tokens
    ids = [drawn[80], drawn[60]]
    at = next(i for i in range(20, 90) if tokenizer.decode(drawn[i : i + 2]).strip().isalnum())
    word = tokenizer.decode(drawn[at : at + 2])
    by_id, by_text, by_texts = (ask(sampler, 24, **long | {"stop": stop}) for stop in (ids, word, ["never seen", word]))
    for cut, free in zip(by_id.result().sequences, whole, strict=True):
        at = next((index for index, token in enumerate(free.tokens) if token in {*ids, *ends}), 99)
        assert cut.tokens == free.tokens[: at + 1]
        assert len(present(cut.logprobs)) == len(cut.tokens)
    assert by_id.result().sequences[which].stop_reason == "stop"
    for form in (by_text, by_texts):
        cut = form.result().sequences[which]
        assert cut.stop_reason == "stop" and cut.tokens == drawn[: len(cut.tokens)]
        assert word in tokenizer.decode(cut.tokens) and word not in tokenizer.decode(cut.tokens[:-1])


def test_071_max_tokens_absent_is_the_context_and_one_is_one(sampler: tinker.SamplingClient) -> None:
    (to_the_end,) = draw(sampler, prompt=prompt(words(4000)), max_tokens=None)
    assert (len(to_the_end.tokens), to_the_end.stop_reason) == (96, "length")
    (one,) = draw(sampler, max_tokens=1)
    assert (len(one.tokens), one.stop_reason) == (1, "length")


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}])
def test_072_greedy_takes_the_likeliest_token(
    sampler: tinker.SamplingClient, reference: Reference, greedy: dict[str, Any]
) -> None:
    tokens = draw(sampler, **greedy)[0].tokens
    rows = reference.distribution_TV(after(tokens))[-len(tokens) - 1 : -1]
    assert tokens == rows.argmax(-1).tolist()


def test_072_top_k_and_top_p_shut_out_the_unlikely_and_temperature_scales(
    sampler: tinker.SamplingClient, reference: Reference
) -> None:
    logprobs = next_logprobs(reference)
    order = np.argsort(-logprobs)
    nucleus = order[: int(np.searchsorted(np.exp(logprobs[order]).cumsum(), 0.4)) + 1]
    for params, allowed, temperature in (
        ({"top_k": 3}, order[:3], 1.0),
        ({"top_p": 0.4}, nucleus, 1.0),
        ({"temperature": 0.5}, order, 0.5),
        ({"temperature": 2.0, "top_k": 5}, order[:5], 2.0),
    ):
        scaled = logprobs / temperature
        expected = scaled - np.logaddexp.reduce(scaled[allowed])
        drawn = draw(sampler, 32, max_tokens=1, seed=1, **params)
        tokens = {one.tokens[0] for one in drawn}
        assert len(tokens) > 1 and tokens <= set(allowed.tolist()), params
        for one in drawn:
            assert present(one.logprobs)[0] == pytest.approx(expected[one.tokens[0]], abs=1e-4), params


def test_072_a_seed_repeats_and_its_samples_differ(sampler: tinker.SamplingClient) -> None:
    first, second, other, huge = ([one.tokens for one in draw(sampler, 4, seed=seed)] for seed in (7, 7, 8, 2**63 - 1))
    assert first == second and other != first and huge not in (first, other)
    assert len({tuple(tokens) for tokens in first}) == 4
    unseeded = [tuple(one.tokens) for _ in range(2) for one in draw(sampler, 3)]
    assert len(set(unseeded)) == 6


def test_076_compute_logprobs_agrees_with_forward(service: tinker.ServiceClient, renderer: Renderer) -> None:
    """With images and a trained adapter, the head's LoRA included; also for the base model."""
    client = service.create_lora_training_client(MODEL, rank=8, seed=2).result()
    untrained = service.create_sampling_client(base_model=MODEL).result()
    inputs = [*MIXED.values(), prompt(words(3, 1), image(64, 64, 1), image(90, 40, 2), words(4, 2))]
    assert_scores_agree(client, untrained, inputs, renderer)
    for number in range(3):
        step(client, batch(renderer, number), types.AdamParams(learning_rate=2e-2))
    assert_scores_agree(client, client.save_weights_and_get_sampling_client().result(), inputs, renderer)


def test_076_of_the_last_n_alone_come_only_those(sampler: tinker.SamplingClient) -> None:
    whole = sampler.compute_logprobs(sdk_input(TEXT)).result()
    last = sampler.compute_logprobs(sdk_input(TEXT), 3).result()
    assert len(whole) == len(last) == 17 and whole[0] is None
    assert last[:-3] == [None] * 14 and last[-3:] == pytest.approx(whole[-3:], abs=1e-5)


def assert_scores_agree(
    client: tinker.TrainingClient, sampler: tinker.SamplingClient, inputs: list[ModelInput], renderer: Renderer
) -> None:
    """Position i + 1 of a prompt scored by the sampler is target i of the trainer's forward."""
    futures = [sampler.compute_logprobs(sdk_input(model_input)) for model_input in inputs]
    for model_input, future in zip(inputs, futures, strict=True):
        ids = renderer.render(model_input, "prompt").token_ids_T
        item = datum(model_input, renderer)
        item = item.model_copy(
            update={
                "loss_fn_inputs": {"target_tokens": np.append(ids[1:], 0), "weights": np.zeros(len(ids), np.float32)}
            }
        )
        (trained,) = logprobs_of(client, [item])
        scored = future.result()
        assert len(scored) == len(ids) and scored[0] is None
        for position in range(1, len(ids)):
            if ids[position] == renderer.config.image_token_id:
                assert scored[position] == 0.0
            else:
                assert scored[position] == pytest.approx(trained[position - 1], abs=1e-4)
