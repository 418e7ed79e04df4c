"""gpt-oss as it is published, in MXFP4, from the trainer to the engine.

pytest tests/contract/test_gpt_oss.py
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines import fork_sampler
from tests.factories import datum, make_renderer, prompt, words
from tests.models import make_tiny_gpt_oss, quantise
from tests.sampling import ATOL, sampler_config, score_distances
from tests.trainers import LORA, logprobs, perturb, reference_logprobs, trainer
from tinker_server.backends.families.gpt_oss import BLOCKS, SCALES, apply_gate, dequantise_blocks, in_common_layout
from tinker_server.backends.protocol import ChatTask, InvalidInput
from tinker_server.backends.sampler.pool import SamplerPool


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same one with its experts in MXFP4."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    source = make_tiny_gpt_oss(directory / "whole")
    quantise(source, directory / "quantised")
    return source, directory / "quantised"


def test_the_trainer_scores_weights_in_mxfp4_as_transformers_does_when_they_are_dequantised(sources) -> None:
    source, quantised = sources
    rank, renderer = trainer(quantised), make_renderer(quantised)
    rank.create_model("fresh", LORA)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    data = [datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 40)]
    for item, got in zip(data, logprobs(rank, data, "fresh"), strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(got, reference_logprobs(renderer, item, model)[:, 0], atol=1e-4)


def test_every_four_bits_and_every_exponent_are_dequantised_as_by_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(2, 5, 1).reshape(2, 5, 16, 16)
    scales = torch.randint(90, 160, (2, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantise_blocks(blocks, scales, torch.bfloat16), wanted)
    assert torch.equal(dequantise_blocks(blocks, scales, torch.float32), wanted.float())  # nothing is rounded


def test_the_activation_is_transformers_own_where_it_clamps_too() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    experts = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=1))
    gate, up = torch.linspace(-20, 20, 41).repeat(41), torch.linspace(-20, 20, 41).repeat_interleave(41)
    wanted = experts._apply_gate(torch.stack([gate, up], -1).flatten())
    torch.testing.assert_close(apply_gate(gate, up), wanted)


def test_files_without_experts_or_with_half_a_matrix_are_refused() -> None:
    half = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    for names in (["lm_head.weight"], [f"mlp.experts.gate_up_proj{BLOCKS}"], [f"mlp.experts.gate_up_proj{SCALES}"]):
        with pytest.raises(ValueError, match="tensors of experts are missing, or their other half in MXFP4"):
            list(in_common_layout([(name, half) for name in names], torch.bfloat16))


@pytest.mark.slow
async def test_the_engine_scores_weights_in_mxfp4_as_the_trainer_and_refuses_conversations(sources, tmp_path) -> None:
    _, quantised = sources
    rank, renderer = trainer(quantised), make_renderer(quantised)
    for name in ("fresh", "a"):
        rank.create_model(name, LORA)
    perturb(rank, "a")
    rank.save_sampler_weights("a", tmp_path / "a", for_elsewhere=False)
    running = SamplerPool(replace(sampler_config(quantised, tmp_path / "scratch"), is_quantised=True), fork_sampler)
    await running.start()
    try:
        for name, weights in (("fresh", None), ("a", tmp_path / "a")):
            assert (await score_distances(running, weights, rank, name, renderer)).max() < ATOL
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        task = ChatTask("chat_completions", body, None, "somebody")
        with pytest.raises(InvalidInput, match="gpt-oss is not supported here: vLLM writes its conversations"):
            await running.chat(task, lambda _: None)
    finally:
        await running.stop()
