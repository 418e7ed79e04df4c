"""Trainer and sampler agree in bfloat16 on a GPU.

pytest tests/gpu
"""

import asyncio

import numpy as np
import pytest
import tinker.types as types

from tests.factories import MIXED, image, prompt, words
from tests.gpu.agreement import LARGEST, MEAN, differences, scoring_datum
from tests.servers import MODEL, sdk_input
from tests.training import batch, logprobs_of, step

pytestmark = pytest.mark.gpu


def test_trainer_and_sampler_agree_on_text_and_images_base_and_adapter(server, renderer):
    service = server.client()
    client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    inputs = [*MIXED.values(), prompt(words(3, 1), image(64, 64, 1), image(90, 40, 2), words(4, 2)), prompt(words(300))]
    base = differences(client, service.create_sampling_client(base_model=MODEL).result(), inputs, renderer)
    for number in range(3):
        step(client, batch(renderer, number), types.AdamParams(learning_rate=5e-3))
    adapted = differences(client, client.save_weights_and_get_sampling_client().result(), inputs, renderer)
    for name, found in (("base", base), ("adapter", adapted)):
        print(f"{name}: mean {found.mean():.4f}, max {found.max():.4f} nats over {len(found)} tokens")
    assert max(base.mean(), adapted.mean()) < MEAN
    assert max(base.max(), adapted.max()) < LARGEST


async def test_two_hundred_prompts_of_two_owners_and_the_base_are_scored_at_once(server, renderer):
    service = server.client()
    clients = [await service.create_lora_training_client(MODEL, rank=1, seed=0)]
    samplers = [await service.create_sampling_client(base_model=MODEL)]
    for seed in (1, 2):
        client = await service.create_lora_training_client(MODEL, rank=8 * seed, seed=seed)
        await asyncio.to_thread(step, client, batch(renderer, seed), types.AdamParams(learning_rate=5e-3))
        clients.append(client)
        samplers.append(await client.save_weights_and_get_sampling_client())
    prompts = [prompt(words(5 + i % 40, i)) for i in range(210)]
    scores = await asyncio.gather(*(samplers[i % 3].compute_logprobs(sdk_input(one)) for i, one in enumerate(prompts)))
    found = []
    for which, client in enumerate(clients):
        items = [scoring_datum(one, renderer) for one in prompts[which::3]]
        rows = await asyncio.to_thread(logprobs_of, client, items)
        found += [np.abs(np.array(got[1:]) - row[:-1]) for got, row in zip(scores[which::3], rows, strict=True)]
    errors = np.concatenate(found)
    print(f"210 at once: mean {errors.mean():.4f}, max {errors.max():.4f} nats")
    assert errors.mean() < MEAN
    assert errors.max() < LARGEST


def test_sampled_tokens_have_the_trainers_logprobs(server, renderer):
    service = server.client()
    client = service.create_lora_training_client(MODEL, rank=8, seed=3).result()
    step(client, batch(renderer), types.AdamParams(learning_rate=5e-3))
    sampler = client.save_weights_and_get_sampling_client().result()
    start = MIXED["one image"]
    length = len(renderer.render(start, "prompt").token_ids_T)
    params = types.SamplingParams(max_tokens=24, seed=4, stop=[])
    response = sampler.sample(sdk_input(start), num_samples=8, sampling_params=params).result()
    errors = []
    for sequence in response.sequences:
        if renderer.config.image_token_id in sequence.tokens:  # a random model samples what no trained one would
            continue
        tail = words(0).model_copy(update={"tokens": np.array(sequence.tokens, np.int32)})
        item = scoring_datum(prompt(*start.chunks, tail), renderer)
        (row,) = logprobs_of(client, [item])
        errors.append(np.abs(np.array(sequence.logprobs) - row[length - 1 : -1]))
    found = np.concatenate(errors)
    print(f"sampled: mean {found.mean():.4f}, max {found.max():.4f} nats")
    assert found.mean() < MEAN
    assert found.max() < LARGEST
