"""Adapters of some rows of a linear, in the engine's slices."""

import pytest
import torch
from vllm.lora.lora_weights import LoRALayerWeights

from tinker_server.backends.sampler.engine.vllm_patches.lora import pack_slices


def part(name: str) -> LoRALayerWeights:
    return LoRALayerWeights(name, 2, 2, torch.zeros(2, 8), torch.zeros(4, 2))


def test_adapters_of_parts_take_the_first_slices_and_a_linear_without_slices_is_refused_by_name() -> None:
    parts: list[LoRALayerWeights | None] = [part(name) for name in "qkvz"]
    packed = pack_slices(parts, 5, "linear_attn.in_proj")
    assert [factor is not None for factor in packed.lora_a] == [True] * 4 + [False]
    with pytest.raises(ValueError, match=r"in_proj_qkvz has adapters of 4 parts .*backend\.lora_layout own"):
        pack_slices(parts, 1, "linear_attn.in_proj_qkvz")
