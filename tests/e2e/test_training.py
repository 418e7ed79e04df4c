"""The SDK against a real server: training and sampling agree with transformers, PEFT and with each other.

pytest tests/e2e
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import tinker
import tinker.types as types
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.contract.test_trainer import reference_logprobs, relative_distance
from tests.factories import MIXED, datum, image, photo, prompt, words
from tests.servers import MODEL, Server, sdk_datum, sdk_input

ADAM = types.AdamParams(learning_rate=3e-3)
PLACEHOLDER = 320
"""The tiny model's <|image_pad|>."""


@pytest.fixture
def service(server: Server) -> tinker.ServiceClient:
    return server.client()


def batch(renderer, seed: int = 0) -> list:
    return [datum(model_input, renderer, seed * 100 + i) for i, model_input in enumerate(MIXED.values())]


def step(client: tinker.TrainingClient, data: list, adam: types.AdamParams = ADAM):
    """One training step; submits both before it awaits either, as recipes do."""
    forward_backward = client.forward_backward([sdk_datum(item) for item in data], "cross_entropy")
    optim_step = client.optim_step(adam)
    result = forward_backward.result()
    optim_step.result()
    return result


def logprobs_of(client: tinker.TrainingClient, data: list) -> list[np.ndarray]:
    output = client.forward([sdk_datum(item) for item in data], "cross_entropy").result()
    return [np.array(row["logprobs"].tolist()) for row in output.loss_fn_outputs]


def saved_adapter(server: Server, path: str) -> dict[str, torch.Tensor]:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    (found,) = Path(server.log.with_suffix("")).glob(f"checkpoints/{run_id}/{kind}/{name}*/adapter_model.safetensors")
    return load_file(found)


def test_five_steps_through_the_sdk_are_those_of_peft_and_torch_optim(server, service, tiny_vl, renderer):
    client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    initial = saved_adapter(server, client.save_state("initial").result().path)
    model = get_peft_model(
        AutoModelForImageTextToText.from_pretrained(tiny_vl),
        PeftLoraConfig(r=8, lora_alpha=32, target_modules=r".*(language_model.*\.(q|k|v|o|gate|up|down)_proj|lm_head)"),
    ).eval()
    own = {name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(initial[name])
    optimizer = torch.optim.AdamW(own.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)
    for number in range(5):
        data = batch(renderer, number)
        result = step(client, data)
        losses = []
        for item in data:
            weights = torch.from_numpy(item.loss_fn_inputs["weights"])[:, None]
            losses.append(-(weights * reference_logprobs(renderer, item, model)).sum())
        sum(losses).backward()
        assert result.metrics["loss:sum"] == pytest.approx(sum(losses).item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    final = saved_adapter(server, client.save_state("final").result().path)
    assert relative_distance([final[name] for name in own], own.values()) <= 1e-5


def test_the_sampler_scores_prompts_as_the_trainer_does(service, renderer):
    """With images and a trained adapter, the head's LoRA included; also for the base model."""
    client = service.create_lora_training_client(MODEL, rank=8, seed=2).result()
    untrained = service.create_sampling_client(base_model=MODEL).result()
    inputs = [*MIXED.values(), prompt(words(3, 1), image(64, 64, 1), image(90, 40, 2), words(4, 2))]
    assert_scores_agree(client, untrained, inputs, renderer)
    for number in range(3):
        step(client, batch(renderer, number), types.AdamParams(learning_rate=2e-2))
    assert_scores_agree(client, client.save_weights_and_get_sampling_client().result(), inputs, renderer)


def assert_scores_agree(client, sampler, inputs, renderer) -> None:
    """Position i + 1 of a prompt scored by the sampler is target i of the trainer's forward."""
    futures = [sampler.compute_logprobs(sdk_input(model_input)) for model_input in inputs]
    for model_input, future in zip(inputs, futures, strict=True):
        rendered = renderer.render(model_input, "prompt")
        ids = rendered.token_ids_T
        item = datum(model_input, renderer)
        item = type(item)(
            model_input=model_input,
            loss_fn_inputs={"target_tokens": np.append(ids[1:], 0), "weights": np.zeros(len(ids), np.float32)},
        )
        (trained,) = logprobs_of(client, [item])
        scored = future.result()
        assert len(scored) == len(ids)
        assert scored[0] is None
        for position in range(1, len(ids)):
            if ids[position] == renderer.config.image_token_id:
                assert scored[position] == 0.0
            else:
                assert scored[position] == pytest.approx(trained[position - 1], abs=1e-4)


def test_sampled_tokens_have_the_trainers_logprobs(service, renderer):
    """What importance sampling relies on: at step 0 the ratio is 1."""
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


def test_interleaved_tenants_of_different_ranks_are_each_as_alone(service, renderer):
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
    chunks = [words(3, 1), image(64, 96, 1), words(5, 2)]
    other = [chunks[0], image(64, 96, 2), chunks[2]]
    first, second = logprobs_of(client, [datum(prompt(*c), renderer, 1) for c in (chunks, other)])
    assert np.abs(first - second)[:3].max() < 1e-5
    assert np.abs(first - second)[-5:].max() > 1e-2


def test_custom_losses_differentiate_what_forward_returned(service, renderer):
    data = batch(renderer)
    gradients = []
    for custom in (True, False):
        client = service.create_lora_training_client(MODEL, rank=8, seed=7).result()
        plain = [sdk_datum(item) for item in data]
        if custom:
            weights = [torch.from_numpy(item.loss_fn_inputs["weights"]) for item in data]

            def loss(_, logprobs, weights=weights):
                return sum(-(w * one).sum() for w, one in zip(weights, logprobs, strict=True)), {}

            client.forward_backward_custom(plain, loss).result()
        else:
            client.forward_backward(plain, "cross_entropy").result()
        client.optim_step(ADAM).result()
        gradients.append(logprobs_of(client, data))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


BAD = {
    "garbage image": (lambda: bad_image(b"not an image"), "chunk 1.*no readable PNG or JPEG"),
    "truncated image": (lambda: bad_image(photo(64, 64)[:200]), "chunk 1.*does not decode"),
    "wrong expected_tokens": (lambda: bad_image(photo(64, 64), 7), "Expected 7 tokens, got 4 from image"),
    "length mismatch": (lambda: bad_targets(np.zeros(3, np.int64)), r"target_tokens has shape \(3,\)"),
    "token id beyond the vocabulary": (lambda: bad_tokens(384), "token id 384 is outside the vocabulary"),
    "target beyond the vocabulary": (lambda: bad_targets(np.full(5, 999)), "target token 999"),
    "placeholder without image": (lambda: bad_tokens(PLACEHOLDER), "image placeholder"),
}


def bad_image(data: bytes, expected: int | None = None) -> types.Datum:
    chunks = [types.EncodedTextChunk(tokens=[1]), types.ImageChunk(data=data, format="png", expected_tokens=expected)]
    return types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.zeros(5, np.int64))},
    )


def bad_targets(targets: np.ndarray) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(targets)},
    )


def bad_tokens(token: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, token]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.zeros(3, np.int64))},
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_input_fails_its_own_future_and_nothing_else(service, renderer, name):
    make, message = BAD[name]
    good = batch(renderer)
    client = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    neighbour = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    neighbours = neighbour.forward_backward([sdk_datum(item) for item in good], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=f"datum 1.*{message}") as caught:
        client.forward_backward([sdk_datum(good[0]), make()], "cross_entropy").result()
    assert caught.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="incomplete"):
        client.optim_step(ADAM).result()
    step(client, good)
    neighbours.result()
    neighbour.optim_step(ADAM).result()
    for one, other in zip(logprobs_of(client, good), logprobs_of(neighbour, good), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_unknown_loss_names_the_known_ones(service, renderer):
    client = service.create_lora_training_client(MODEL, rank=4, seed=9).result()
    with pytest.raises(tinker.RequestFailedError, match=r"stable_reinforce.*cross_entropy, importance_sampling"):
        client.forward_backward([sdk_datum(batch(renderer)[0])], "stable_reinforce").result()
    with pytest.raises(tinker.RequestFailedError, match="incomplete"):
        client.optim_step(ADAM).result()
    step(client, batch(renderer))


async def test_bad_prompts_are_refused_and_the_engine_goes_on(service):
    sampler = await service.create_sampling_client(base_model=MODEL)
    params = types.SamplingParams(max_tokens=2)
    bad = [
        (types.ModelInput.from_ints([1, 999]), "token id 999"),
        (types.ModelInput.from_ints([1, PLACEHOLDER]), "image placeholder"),
        (types.ModelInput.from_ints([1] * 4095), "context window: 4095 \\+ 2 > 4096"),
        (types.ModelInput(chunks=[types.ImageChunk(data=b"junk", format="png")]), "no readable PNG or JPEG"),
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


async def test_two_hundred_prompts_are_scored_at_once_by_tenants_and_base(service, renderer):
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
        ids = model_input.chunks[0].tokens
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
