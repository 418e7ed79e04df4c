"""An engine that keeps latents in place of whole keys and values, on CUDA: against the trainer, with prompts that are
cut, and with prompts whose beginning is in the cache.

pytest tests/gpu/test_latent_cache.py
"""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.factories import cross_entropy, make_renderer, present, prompt, words
from tests.gpu.agreement import ON_CUDA, TEXTS, assert_close, drawn_datum, of_text, on_cuda, scoring_datum
from tests.models import LATENTS, make_tiny_deepseek_v3
from tests.sampling import request, sample, sampler_config
from tests.trainers import forward_backward, perturb
from tinker_server.api_schemas.inputs import EncodedTextChunk
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = pytest.mark.gpu
BEGINNING = 700


@pytest.mark.parametrize(("q_lora_rank", "latent_cache"), [(48, True), (None, True), (48, False)])
async def test_an_engine_that_keeps_latents_scores_and_draws_as_the_trainer(
    q_lora_rank: int | None, latent_cache: bool, tmp_path: Path
) -> None:
    source = make_tiny_deepseek_v3(
        tmp_path / "model", **LATENTS, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=q_lora_rank
    )
    rank, renderer = on_cuda(source, "bfloat16"), make_renderer(source)
    for number, name in enumerate(("a", "b")):
        rank.create_model(name, Trainable(rank=4 << number, seed=number, layout="service"))
        perturb(rank, name)
        rank.save_sampler_weights(name, tmp_path / name, for_elsewhere=False)
    spec = dataclasses.replace(sampler_config(source, tmp_path / "scratch"), **ON_CUDA, expert_slots="service")
    # Steps of fewer tokens than a prompt has.
    spec = dataclasses.replace(spec, latent_cache=latent_cache, engine_tokens=512, max_concurrent_samples=64)
    running = SamplerPool(spec)
    await running.start()
    data = [(name, scoring_datum(text, renderer)) for text in TEXTS.values() for name in ("a", "b")]
    begun = words(BEGINNING, 7).tokens
    ends = [words(1 + seed % 5, seed).tokens for seed in range(48)]
    texts = [prompt(EncodedTextChunk(tokens=np.concatenate([begun, end]))) for end in ends]
    asked = [(name, given) for name in ("a", "b") for given in texts]
    scoring, drawing = {"max_tokens": 1}, {"max_tokens": 12, "stop": []}
    try:
        scores = await asyncio.gather(
            *(
                sample(running, request(item.model_input, scoring, prompt_logprobs=True), tmp_path / name)
                for name, item in data
            )
        )
        drawn = await asyncio.gather(
            *(sample(running, request(given, drawing), tmp_path / name) for name, given in asked)
        )
    finally:
        await running.stop()
    label = f"latents {latent_cache}, queries' {q_lora_rank}"
    found = []
    for (name, item), answer in zip(data, scores, strict=True):
        (row,) = present(forward_backward(rank, name, cross_entropy([item]), False)).loss_fn_outputs
        found.append(of_text(item, present(answer.prompt_logprobs), row["logprobs"], renderer))
    assert_close(label, np.concatenate(found))
    found = []
    for (name, given), answer in zip(asked, drawn, strict=True):
        (sequence,) = answer.sequences
        (row,) = present(
            forward_backward(rank, name, cross_entropy([drawn_datum(given, sequence)]), False)
        ).loss_fn_outputs
        found.append(np.abs(sequence.logprobs - row["logprobs"][-len(sequence.logprobs) :]))
    assert_close(f"{label}, drawn behind {BEGINNING} tokens", np.concatenate(found))
