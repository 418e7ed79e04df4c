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
from tests.factories import cross_entropy, datum, make_renderer, present, prompt, words
from tests.models import make_tiny_gpt_oss, quantise
from tests.sampling import ATOL, sampler_config, score_distances
from tests.trainers import (
    LORA,
    forward_backward,
    gradients,
    logprobs,
    perturb,
    reference_logprobs,
    trainer,
)
from tinker_server.backends.families.gpt_oss import apply_gate, in_common_layout
from tinker_server.backends.formats import mxfp4
from tinker_server.backends.formats.packed import joined
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
    files = [("a_scales", scales), ("a_blocks", blocks)]
    assert dict(joined(files, torch.bfloat16))["a"].equal(wanted)
    assert dict(joined(files, torch.float32))["a"].equal(wanted.float())  # nothing is rounded
    (stack,) = dict(joined(files, torch.bfloat16, ["a"])).values()
    found = [mxfp4.unpack(matrix, torch.empty(5, 512, dtype=torch.bfloat16)) for matrix in stack]
    assert torch.stack(found).mT.equal(wanted)
    assert stack.nbytes == 2 * 5 * mxfp4.row_bytes(512) == 2 * 5 * (256 + 16)


def test_the_activation_is_transformers_own_where_it_clamps_too() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    experts = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=1))
    gate, up = torch.linspace(-20, 20, 41).repeat(41), torch.linspace(-20, 20, 41).repeat_interleave(41)
    wanted = experts._apply_gate(torch.stack([gate, up], -1).flatten())
    torch.testing.assert_close(apply_gate(gate, up), wanted)


def test_files_without_experts_or_with_half_a_matrix_are_refused() -> None:
    half = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="tensors of experts are missing"):
        list(in_common_layout([("lm_head.weight", half)]))
    for ending in (mxfp4.BLOCKS, mxfp4.SCALES):
        with pytest.raises(ValueError, match=r"tensors in fp8 or mxfp4, or their scales, are missing: gate_up_proj$"):
            list(joined([(f"gate_up_proj{ending}", half)], torch.bfloat16))


@pytest.mark.parametrize("layout", ["own", "service"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_stay_in_mxfp4_have_the_scores_and_gradients_of_dequantised_ones(sources, dtype, layout) -> None:
    _, quantised = sources
    renderer = make_renderer(quantised)
    data = [datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 40)]
    found, ranks = [], []
    for precision in (None, "mxfp4"):
        rank = trainer(quantised, dtype=dtype, base_precision=precision, lora_layout=layout)
        rank.create_model("m", LORA.model_copy(update={"layout": layout}))
        perturb(rank, "m")
        output = present(forward_backward(rank, "m", cross_entropy(data)))
        found.append(([row["logprobs"] for row in output.loss_fn_outputs], gradients(rank, "m")))
        ranks.append(rank)
    (whole, wanted), (scores, got) = found
    assert all(np.array_equal(row, other) for row, other in zip(scores, whole, strict=True))
    assert got.keys() == wanted.keys() and all(got[name].equal(wanted[name]) for name in wanted)
    assert any("experts" in name and tensor.any() for name, tensor in got.items())
    stacks = [rank.base.scorer.model.get_decoder().layers[0].mlp.experts.base for rank in ranks]
    for name in ("gate_up_proj", "down_proj"):
        whole_ENK, packed_ENR = (getattr(stack, name) for stack in stacks)
        assert packed_ENR.dtype == torch.uint8
        assert packed_ENR.shape == (*whole_ENK.shape[:2], mxfp4.row_bytes(whole_ENK.shape[2]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["own", "service"])
@pytest.mark.parametrize("precision", [None, "mxfp4"])
async def test_the_engine_scores_weights_in_mxfp4_as_the_trainer_and_refuses_conversations(
    sources, precision, layout, tmp_path
) -> None:
    _, quantised = sources
    rank, renderer = trainer(quantised, base_precision=precision), make_renderer(quantised)
    for name in ("fresh", "a"):
        rank.create_model(name, LORA.model_copy(update={"layout": layout}))
    perturb(rank, "a")
    rank.save_sampler_weights("a", tmp_path / "a", for_elsewhere=False)
    spec = replace(sampler_config(quantised, tmp_path / "scratch"), is_quantised=True, base_precision=precision)
    running = SamplerPool(replace(spec, expert_slots=layout), fork_sampler)
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
