"""Adapters of some rows of a linear, in the engine's slices."""

import torch
from vllm.lora.lora_weights import LoRALayerWeights

from tinker_server.backends.sampler.engine.vllm_patches.lora import pack_slices


def part(name: str) -> LoRALayerWeights:
    return LoRALayerWeights(name, 2, 2, torch.zeros(2, 8), torch.zeros(4, 2))


def test_adapters_of_parts_take_the_first_slices() -> None:
    packed = pack_slices([part(name) for name in "qkvz"], 5)
    assert [factor is not None for factor in packed.lora_a] == [True] * 4 + [False]
