"""The SDK against a real server: training and sampling agree, and models do not affect each other.

pytest tests/e2e
"""

import asyncio

import numpy as np
import pytest
import tinker
import tinker.types as types

from tests.factories import MIXED, as_text, datum, image, photo, prompt, words
from tests.servers import MODEL, Server, sdk_datum, sdk_input
from tests.training import ADAM, PLACEHOLDER, batch, logprobs_of, step
from tinker_server.api_schemas.inputs import Chunk


@pytest.fixture
def service(server: Server) -> tinker.ServiceClient:
    return server.client()


def test_sampled_tokens_have_the_trainers_logprobs(service, renderer):
    """Importance sampling relies on it: at step 0 the ratio is 1."""
    client = service.create_lora_training_client(MODEL, rank=8, seed=3).result()
    step(client, batch(renderer), types.AdamParams(learning_rate=2e-2))
    sampler = client.save_weights_and_get_sampling_client().result()
    start = prompt(words(3, 1), image(64, 96, 1), words(4, 2))
    length = len(renderer.render(start, "prompt").token_ids_T)
    response = sampler.sample(
        sdk_input(start), num_samples=3, sampling_params=types.SamplingParams(max_tokens=12, seed=4, stop=[])
    ).result()
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        if PLACEHOLDER in sequence.tokens:  # a random model samples what no trained one would
            continue
        whole = prompt(*start.chunks, words(0).model_copy(update={"tokens": np.array(sequence.tokens[:-1], np.int32)}))
        ids = renderer.render(whole, "prompt").token_ids_T
        item = datum(whole, renderer)
        item = type(item)(
            model_input=whole,
            loss_fn_inputs={
                "target_tokens": np.append(ids[1:], sequence.tokens[-1]),
                "weights": np.zeros(len(ids), np.float32),
            },
        )
        (trained,) = logprobs_of(client, [item])
        np.testing.assert_allclose(sequence.logprobs, trained[length - 1 :], atol=1e-4)


def test_interleaved_models_of_different_ranks_equal_each_alone(service, renderer):
    def run(ranks: list[int]) -> dict[int, list[np.ndarray]]:
        clients = {rank: service.create_lora_training_client(MODEL, rank=rank, seed=rank).result() for rank in ranks}
        for number in range(3):
            pending = []
            for rank, client in clients.items():
                data = [sdk_datum(item) for item in batch(renderer, number + rank)]
                pending += [client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)]
            for future in pending:
                future.result()
        return {rank: logprobs_of(client, batch(renderer)) for rank, client in clients.items()}

    together = run([4, 16])
    for rank in (4, 16):
        for one, other in zip(together[rank], run([rank])[rank], strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_snapshot_keeps_its_weights_while_training_goes_on(service, renderer):
    client = service.create_lora_training_client(MODEL, rank=8, seed=5).result()
    step(client, batch(renderer), types.AdamParams(learning_rate=2e-2))
    model_input = sdk_input(MIXED["one image"])
    named = client.save_weights_for_sampler("snapshot").result().path
    snapshot, by_name = (
        client.save_weights_and_get_sampling_client().result(),
        service.create_sampling_client(model_path=named).result(),
    )
    before = snapshot.compute_logprobs(model_input).result()
    for number in range(3):
        step(client, batch(renderer, number), types.AdamParams(learning_rate=2e-2))
    later = client.save_weights_and_get_sampling_client().result()
    assert snapshot.compute_logprobs(model_input).result()[1:] == pytest.approx(before[1:], abs=1e-5)
    assert by_name.compute_logprobs(model_input).result()[1:] == pytest.approx(before[1:], abs=1e-5)
    changed = np.abs(np.array(later.compute_logprobs(model_input).result()[1:]) - np.array(before[1:]))
    assert changed.max() > 0.1


def test_images_matter(service, renderer):
    client = service.create_lora_training_client(MODEL, rank=8, seed=6).result()
    chunks: list[Chunk] = [words(3, 1), image(64, 96, 1), words(5, 2)]
    other = [chunks[0], image(64, 96, 2), chunks[2]]
    first, second = logprobs_of(client, [datum(prompt(*c), renderer, 1) for c in (chunks, other)])
    assert np.abs(first - second)[:3].max() < 1e-5
    assert np.abs(first - second)[-5:].max() > 1e-2


async def test_bad_prompts_are_refused_and_the_engine_goes_on(service):
    sampler = await service.create_sampling_client(base_model=MODEL)
    params = types.SamplingParams(max_tokens=2)
    bad = [
        (types.ModelInput.from_ints([1, 999]), "token id 999"),
        (types.ModelInput.from_ints([1, PLACEHOLDER]), "placeholder of an image"),
        (types.ModelInput.from_ints([1] * 4095), "context window: 4095 \\+ 2 > 4096"),
        (types.ModelInput(chunks=[types.ImageChunk(data=b"junk", format="png")]), "not a readable PNG or JPEG"),
        (
            types.ModelInput(chunks=[types.ImageChunk(data=photo(64, 64), format="png", expected_tokens=9)]),
            "Expected 9 tokens, got 4 from image",
        ),
    ]
    for model_input, message in bad:
        with pytest.raises(tinker.BadRequestError, match=message):
            await sampler.sample(model_input, 1, params)
    response = await sampler.sample(types.ModelInput.from_ints([1, 2]), 1, params)
    assert len(response.sequences[0].tokens) <= 2


async def test_two_hundred_prompts_are_scored_at_once_by_models_and_base(service, renderer):
    """The cookbook's evaluators do this, with adapters on the head."""
    samplers, expected = [await service.create_sampling_client(base_model=MODEL)], []
    clients = []
    for seed in (1, 2):
        client = await service.create_lora_training_client(MODEL, rank=8 * seed, seed=seed)
        await asyncio.to_thread(step, client, batch(renderer, seed), types.AdamParams(learning_rate=2e-2))
        samplers.append(await client.save_weights_and_get_sampling_client())
        clients.append(client)
    prompts = [prompt(words(5 + i % 40, i)) for i in range(210)]
    scores = await asyncio.gather(
        *(samplers[i % 3].compute_logprobs(sdk_input(model_input)) for i, model_input in enumerate(prompts))
    )
    base = await service.create_lora_training_client(MODEL, rank=1, seed=0)  # B is zero: the base model
    for i, (model_input, got) in enumerate(zip(prompts, scores, strict=True)):
        ids = as_text(model_input.chunks[0]).tokens
        item = datum(model_input, renderer)
        item = type(item)(
            model_input=model_input,
            loss_fn_inputs={
                "target_tokens": np.append(ids[1:], 0).astype(np.int64),
                "weights": np.zeros(len(ids), np.float32),
            },
        )
        expected.append((i % 3, item, got))
    for which, client in enumerate([base, *clients]):
        mine = [(item, got) for owner, item, got in expected if owner == which]
        rows = await asyncio.to_thread(logprobs_of, client, [item for item, _ in mine])
        for (_, got), row in zip(mine, rows, strict=True):
            np.testing.assert_allclose(got[1:], row[:-1], atol=1e-4)
