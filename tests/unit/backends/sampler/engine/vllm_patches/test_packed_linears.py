"""Linears of the engine that stay in fp8: the parts that files have of them."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

from tinker_server.backends.formats.block_fp8 import packed
from tinker_server.backends.sampler.engine.vllm_patches.block_fp8 import PackedFp8

MODULE = "layers.0.linear_attn"
INPUTS = 140


class Linear(LinearBase):  # type: ignore[misc]
    def __init__(self) -> None:
        nn.Module.__init__(self)


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
    method, layer = config.get_quant_method(Linear(), f"model.{MODULE}.in_proj_qkvz"), nn.Module()
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
