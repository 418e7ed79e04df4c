"""Linears of the engine that stay in fp8: the parts that files have of them."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

from tinker_server.backends.formats.block_fp8 import packed, unpack
from tinker_server.backends.sampler.engine.vllm_patches.block_fp8 import PackedFp8, PackedLinearMethod

MODULE = "layers.0.linear_attn"
INPUTS = 140


class Linear(LinearBase):  # type: ignore[misc]
    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        nn.Module.__init__(self)
        self.tp_rank, self.tp_size = rank, num_ranks


@pytest.mark.parametrize(
    ("mapping", "outputs_of_engine", "outputs_of_files"),
    [
        (Qwen3NextForCausalLM.packed_modules_mapping, [520], {"in_proj_qkvz": 520}),
        (
            Qwen3_5ForCausalLM.packed_modules_mapping,
            [130, 130, 130, 130],
            {"in_proj_qkv": 390, "in_proj_z": 130},
        ),
    ],
)
def test_an_input_projection_of_linear_attention_has_the_tensors_of_the_files(
    mapping: Mapping[str, list[str]], outputs_of_engine: list[int], outputs_of_files: dict[str, int]
) -> None:
    config = PackedFp8([f"model.{MODULE}.{name}.weight" for name in outputs_of_files])
    config.packed_modules_mapping = dict(mapping)
    layer = Linear()
    method = config.get_quant_method(layer, f"model.{MODULE}.in_proj_qkvz")
    assert method is not None
    total = sum(outputs_of_engine)
    method.create_weights(layer, INPUTS, outputs_of_engine, INPUTS, total, torch.bfloat16)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    tensors = []
    for outputs, part in zip(outputs_of_files.values(), [(0, 1, 2), 3], strict=False):
        numbers = torch.randn(outputs, INPUTS).to(torch.float8_e4m3fn)
        tensors.append(packed(numbers, torch.rand(-(-outputs // 128), -(-INPUTS // 128))))
        weight.weight_loader(weight, tensors[-1], *([part] if len(outputs_of_files) > 1 else []))  # type: ignore[attr-defined]
    method.process_weights_after_loading(layer)
    assert weight.equal(torch.cat(tensors))


@pytest.mark.parametrize(
    ("decoder", "tower"),
    [
        ("language_model.model", "vision_tower.vision_model.encoder"),  # Gemma 3's
        ("model.text_model", "model.vision_model.encoder"),  # SmolVLM's
    ],
)
def test_a_vision_tower_with_the_names_of_the_decoder_keeps_its_numbers(decoder: str, tower: str) -> None:
    names = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.down_proj"]
    config = PackedFp8([f"model.language_model.layers.0.{name}.weight" for name in names])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    for linear in ("self_attn.qkv_proj", "mlp.down_proj"):
        methods = [config.get_quant_method(Linear(), f"{root}.layers.0.{linear}") for root in (decoder, tower)]
        assert [type(one) for one in methods] == [PackedLinearMethod, UnquantizedLinearMethod]


def test_each_rank_has_its_part_of_a_linear_in_fp8_and_of_what_the_files_have_whole() -> None:
    queries, keys = 512, 128  # of which two ranks share each
    config = PackedFp8([f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    wholes = {name: torch.randn(size, INPUTS) for name, size in zip("qkv", (queries, keys, keys), strict=True)}
    numbers = {name: wholes[name].to(torch.float8_e4m3fn) for name in "qk"}
    loaded = {name: packed(numbers[name], torch.rand(-(-len(numbers[name]) // 128), 2)) for name in "qk"}
    unpacked = {name: unpack(loaded[name], torch.empty(len(numbers[name]), INPUTS)) for name in "qk"} | {
        "v": wholes["v"]
    }
    for rank in range(4):
        layer = Linear(rank, 4)
        method = config.get_quant_method(layer, "model.layers.1.self_attn.qkv_proj")
        assert method is not None
        method.create_weights(layer, INPUTS, [128, 64, 64], INPUTS, 4 * 256, torch.float32)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        for name in "qkv":
            weight.weight_loader(weight, loaded.get(name, wholes[name]), name)  # type: ignore[attr-defined]
        method.process_weights_after_loading(layer)
        half = slice(rank // 2 * 64, rank // 2 * 64 + 64)
        parts = [unpacked["q"][rank * 128 : (rank + 1) * 128], unpacked["k"][half], unpacked["v"][half]]
        assert method.apply(layer, torch.eye(INPUTS)).equal(torch.cat(parts).T)
