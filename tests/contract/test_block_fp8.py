"""Bases as they are published in fp8, from the trainer to the engine: all compute with the dequantised numbers.

pytest tests/contract/test_block_fp8.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

from tests.factories import MIXED, cross_entropy, datum, make_renderer, present, prompt, words
from tests.fp8_scores import assert_scored_alike
from tests.models import (
    DIVIDED_IN_FP8,
    EXPERTS,
    make_tiny_deepseek_v3,
    make_tiny_of,
    make_tiny_qwen3_5,
    make_tiny_qwen3_next,
    make_tiny_vl,
    quantise_in_blocks,
)
from tests.ranks import Stepped, check_two_are_as_one, two_steps
from tests.trainers import (
    LORA,
    config,
    forward_backward,
    gradients,
    logprobs,
    perturb,
    reference_logprobs,
    trainer,
)
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.formats.block_fp8 import packed, packed_bytes
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.linear import lora_linears
from tinker_server.backends.trainer.model.loading import load
from tinker_server.backends.trainer.rank import TrainerRank

Sizes = dict[str, Any]
WIDE: Sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 320}
"""Sizes that 128 does not divide."""
EVEN: Sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 384}
MODELS: dict[str, Callable[[Path], Path]] = {
    "Qwen3": partial(make_tiny_of, "qwen3", **WIDE),
    "Qwen3 MoE": partial(make_tiny_of, "qwen3_moe", **{**EXPERTS, **WIDE, "moe_intermediate_size": 160}),
    "Phi-3": partial(make_tiny_of, "phi3", **WIDE),
    "Qwen3-VL": make_tiny_vl,
    "Qwen3-VL MoE": partial(make_tiny_vl, moe=True),
    "Qwen3.5": make_tiny_qwen3_5,
    "Qwen3.5 MoE": partial(make_tiny_qwen3_5, moe=True),
    "Qwen3-Next": make_tiny_qwen3_next,
    "DeepSeek-V3": make_tiny_deepseek_v3,
}
MIXTURES = ("Qwen3 MoE", "Qwen3-VL MoE", "Qwen3.5 MoE", "Qwen3-Next", "DeepSeek-V3")
POWERS_OF_TWO = {"Qwen3 MoE": torch.float32, "DeepSeek-V3": torch.float8_e8m0fnu}
"""Types of scales that are powers of two, of some of the models."""
ROUNDING = 1e-6
"""Of sums in float32: where a weight begins in memory may change their order."""
TEXTS = {f"{length} words": prompt(words(length, length)) for length in (5, 11, 23)}


@pytest.fixture(scope="module", params=MODELS)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The dequantised model, and the one in fp8."""
    directory = tmp_path_factory.mktemp("fp8")
    source = MODELS[request.param](directory / "whole")
    return source, quantise_in_blocks(source, directory / "quantised", POWERS_OF_TWO.get(request.param))


def test_trainer_scores_and_gradients_are_those_of_the_dequantised_base(sources) -> None:
    source, quantised = sources
    renderer = make_renderer(quantised)
    inputs = MIXED if renderer.takes_images else TEXTS
    data = [datum(model_input, renderer, seed) for seed, model_input in enumerate(inputs.values())]
    found = {}
    for directory in sources:
        rank = trainer(directory)
        rank.create_model("m", LORA)
        fresh = logprobs(rank, data)
        perturb(rank, "m")
        forward_backward(rank, "m", cross_entropy(data))
        found[directory] = fresh, gradients(rank, "m")
    model = _transformers(source, renderer.takes_images)
    for item, scores, whole in zip(data, found[quantised][0], found[source][0], strict=True):
        np.testing.assert_allclose(scores, whole, rtol=ROUNDING)
        with torch.no_grad():
            np.testing.assert_allclose(scores, reference_logprobs(renderer, item, model)[:, 0], atol=1e-4)
    got, wanted = found[quantised][1], found[source][1]
    assert got.keys() == wanted.keys() and any(tensor.any() for tensor in got.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=ROUNDING * float(gradient.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "make",
    [
        partial(make_tiny_of, "qwen3", **EVEN),
        partial(make_tiny_of, "qwen3_moe", **{**EXPERTS, **EVEN, "moe_intermediate_size": 128}),
        make_tiny_vl,
    ],
)
def test_the_trainer_has_the_numbers_of_transformers_own_dequantisation(make, dtype: Any, tmp_path: Path) -> None:
    quantised = quantise_in_blocks(make(tmp_path / "whole"), tmp_path / "quantised")
    renderer = make_renderer(quantised)
    options: dict[str, Any] = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": dtype}
    wanted = dict(_transformers(quantised, renderer.takes_images, **options).named_parameters())
    spec = replace(config(quantised), dtype=dtype)
    family = find_family(renderer.config, str(quantised))
    got = dict(load(spec, family, World(0, 1, torch.device("cpu")), is_sharded=False).model.named_parameters())
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and got[name].equal(tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sources", ["Qwen3", "Phi-3", "Qwen3-VL", "Qwen3.5", *MIXTURES], indirect=True)
def test_linears_that_stay_in_fp8_have_the_scores_and_gradients_of_dequantised_ones(sources, dtype: Any) -> None:
    _, quantised = sources
    renderer = make_renderer(quantised)
    inputs = MIXED if renderer.takes_images else TEXTS
    data = [datum(model_input, renderer, seed) for seed, model_input in enumerate(inputs.values())]
    ranks, found = [], []
    precisions: list[Literal["fp8"] | None] = [None, "fp8"]
    for precision in precisions:
        spec = replace(config(quantised), dtype=dtype, base_precision=precision)
        ranks.append(rank := TrainerRank(spec, World(0, 1, torch.device("cpu"))))
        rank.create_model("m", LORA)
        perturb(rank, "m")
        output = forward_backward(rank, "m", cross_entropy(data))
        found.append(([one["logprobs"] for one in present(output).loss_fn_outputs], gradients(rank, "m")))
    (whole, wanted), (scores, got) = found
    assert all(np.array_equal(one, other) for one, other in zip(scores, whole, strict=True))
    assert got.keys() == wanted.keys() and all(got[name].equal(wanted[name]) for name in wanted)
    layers = [rank.base.scorer.model.get_decoder().layers for rank in ranks]
    matrices = [{name: one for name, one in part.named_parameters() if name.endswith("base.weight")} for part in layers]
    whole_names = {name for name, one in matrices[1].items() if one.dtype != torch.uint8}
    of_files = () if renderer.takes_images else ("0.self_attn.k_proj.base.weight",)
    gates = tuple(f"linear_attn.in_proj_{gate}.base.weight" for gate in ("a", "b", "ba"))
    assert whole_names == {name for name in matrices[1] if name in of_files or name.endswith(gates)}
    for name in matrices[1].keys() - whole_names:
        assert matrices[1][name].nbytes == packed_bytes(*matrices[0][name].shape), name
    for name, stack in layers[0].named_parameters():
        if name.endswith(("experts.base.gate_up_proj", "experts.base.down_proj")):
            matrices_of_one = 2 if "gate_up" in name else 1
            of_one = packed_bytes(stack.shape[1] // matrices_of_one, stack.shape[2])
            packed_stack = layers[1].get_parameter(name)
            assert packed_stack.dtype == torch.uint8
            assert packed_stack.shape == (len(stack), matrices_of_one * of_one), name


def on_ranks(world: World, source: Path) -> Stepped:
    """Outputs of two steps on mixed samples, and the adapter after them, of rank 0; ranks share the base in fp8."""
    renderer = make_renderer(source)
    inputs = MIXED if renderer.takes_images else TEXTS
    data = [datum(model_input, renderer, seed) for seed, model_input in enumerate(inputs.values())]
    rank = TrainerRank(replace(config(source, 60, num_ranks=world.size), base_precision="fp8"), world)
    packed_parameters = [one for one in rank.base.scorer.model.parameters() if one.dtype == torch.uint8]
    assert packed_parameters and all(isinstance(one, DTensor) == (world.size > 1) for one in packed_parameters)
    rank.create_model("m", LORA)
    return two_steps(rank, "m", cross_entropy(data))


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["Qwen3", "Qwen3-VL", *MIXTURES], indirect=True)
def test_two_ranks_that_share_a_base_in_fp8_are_as_one(sources) -> None:
    check_two_are_as_one(on_ranks, sources[1])


def test_backward_keeps_the_bytes_and_no_dequantised_weight() -> None:
    outputs, inputs, rank = 130, 140, 3
    weight = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    bytes_ = packed(weight, torch.rand(2, 2))
    a, b = [torch.randn(rank, inputs)], [torch.randn(rank, outputs)]
    sum_a, sum_b = [torch.zeros(rank, inputs)], [torch.zeros(rank, outputs)]
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        x = torch.randn(5, inputs, requires_grad=True)
        y, _ = lora_linears(x, [bytes_], a, b, sum_a, sum_b, torch.ones(1, rank), [0, 0, outputs, 1], [outputs])
    y.sum().backward()
    assert any(one.dtype == torch.uint8 for one in saved) and not any(one.shape == weight.shape for one in saved)


@pytest.mark.slow
async def test_the_engine_scores_a_base_in_fp8_as_the_trainer(sources, tmp_path: Path) -> None:
    await assert_scored_alike(replace(config(sources[1]), is_quantised=True), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["Qwen3", "Qwen3-VL", "Phi-3", "Qwen3.5", *MIXTURES], indirect=True)
async def test_an_engine_whose_linears_stay_in_fp8_scores_as_the_trainer(sources, tmp_path: Path) -> None:
    await assert_scored_alike(replace(config(sources[1]), is_quantised=True, base_precision="fp8"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIVIDED_IN_FP8)
async def test_an_engine_of_several_ranks_whose_base_stays_in_fp8_scores_as_the_trainer(
    kind: str, tmp_path: Path
) -> None:
    make, num_ranks = DIVIDED_IN_FP8[kind]
    quantised = quantise_in_blocks(make(tmp_path / "whole"), tmp_path / "quantised")
    spec = replace(config(quantised), is_quantised=True, base_precision="fp8")
    await assert_scored_alike(spec, tmp_path, num_ranks)


def _transformers(source: Path, takes_images: bool, **options: Any):
    kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    return kind.from_pretrained(source, **options).eval()
