"""Experts and linear attention on CUDA: trainer as on the CPU, sampler as trainer.

pytest tests/gpu/test_families.py
"""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from api_schemas.inputs import Datum
from backends.sampler.client import SamplerClient
from backends.trainer.parallel import World
from backends.trainer.rank import TrainerRank
from tests.factories import MIXED, cross_entropy, datum, make_renderer, prompt, words
from tests.gpu.agreement import LARGEST, MEAN, scoring_datum
from tests.models import FAMILIES
from tests.sampling import request, sample, sampler_config
from tests.trainers import LORA, config, forward_backward, gradients, perturb, relative_distance, trainer

pytestmark = pytest.mark.gpu
TEXTS = {f"{length} words": prompt(words(length, length)) for length in (5, 11, 23, 300)}
SAMPLED = ("Qwen3 MoE", "Qwen3-VL MoE", "Qwen3.5", "Qwen3.5 MoE", "Qwen2.5-VL", "InternVL", "SmolVLM2")
"""One of each: experts, with images too, linear attention, both, windows in the vision tower, and tiles of an image."""


def on_cuda(source: Path, dtype: str) -> TrainerRank:
    settings = dataclasses.replace(config(source), device="cuda", dtype=dtype)
    return TrainerRank(settings, World(0, 1, torch.device("cuda", 0)))


def inputs(renderer) -> list[Datum]:
    of_kind = MIXED if renderer.takes_images else TEXTS
    return [scoring_datum(model_input, renderer) for model_input in of_kind.values()]


def scored(rank: TrainerRank, data: list[Datum]) -> list[np.ndarray]:
    rank.create_model("m", LORA)
    perturb(rank, "m")
    return [one["logprobs"] for one in forward_backward(rank, "m", cross_entropy(data), True).loss_fn_outputs]


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_trainer_computes_as_on_the_cpu(kind, tmp_path):
    source = FAMILIES[kind](tmp_path / "model")
    renderer = make_renderer(source)
    given = [datum(one.model_input, renderer, seed) for seed, one in enumerate(inputs(renderer))]
    on_cpu = trainer(source)
    expected, expected_gradients = scored(on_cpu, given), gradients(on_cpu, "m")
    for dtype, mean, largest in (("float32", 1e-3, 1e-2), ("bfloat16", MEAN, LARGEST)):
        rank = on_cuda(source, dtype)
        found = np.concatenate([np.abs(a - b) for a, b in zip(scored(rank, given), expected, strict=True)])
        got = [gradient.cpu() for gradient in gradients(rank, "m").values()]
        distance = relative_distance(got, expected_gradients.values())
        print(f"{kind}, {dtype}: mean {found.mean():.5f}, max {found.max():.5f} nats, gradients {distance:.4f}")
        if dtype == "float32":
            assert distance < 2e-2
        assert found.mean() < mean
        # Rounding sends a token of a mixture to another expert: not wrong, but far.
        assert np.quantile(found, 0.95) < largest


@pytest.mark.parametrize("kind", SAMPLED)
async def test_the_sampler_scores_as_the_trainer(kind, tmp_path):
    source = FAMILIES[kind](tmp_path / "model")
    rank, renderer = on_cuda(source, "bfloat16"), make_renderer(source)
    data, weights = inputs(renderer), {}
    for number, name in enumerate(("a", "b")):
        rank.create_model(name, LORA.model_copy(update={"rank": 4 << number, "seed": number}))
        perturb(rank, name)
        weights[name] = tmp_path / name
        rank.save_sampler_weights(name, weights[name], for_elsewhere=False)
    settings = {"device": "cuda", "dtype": "bfloat16", "gpu_memory_fraction": 0.2, "kv_cache_bytes": 1 << 30}
    running = SamplerClient(dataclasses.replace(sampler_config(source, tmp_path / "scratch"), **settings))
    await running.start()
    try:
        asked = [(name, item) for item in data for name in weights]
        answers = await asyncio.gather(
            *(
                sample(running, request(item.model_input, {"max_tokens": 1}, prompt_logprobs=True), weights[name])
                for name, item in asked
            )
        )
    finally:
        await running.stop()
    differences = []
    for (name, item), answer in zip(asked, answers, strict=True):
        (row,) = forward_backward(rank, name, cross_entropy([item]), False).loss_fn_outputs
        text = item.loss_fn_inputs["target_tokens"][:-1] != getattr(renderer.config, "image_token_id", -1)
        differences.append(np.abs(np.array(answer.prompt_logprobs[1:]) - row["logprobs"][:-1])[text])
    found = np.concatenate(differences)
    print(f"{kind}: mean {found.mean():.4f}, max {found.max():.4f} nats over {len(found)} tokens")
    assert found.mean() < MEAN
    assert np.quantile(found, 0.95) < LARGEST
