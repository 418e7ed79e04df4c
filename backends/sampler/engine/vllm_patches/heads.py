"""Adapters for heads of more than 258,048 tokens, a limit of kernels that vLLM 0.32 has no longer. Slots and scores are
compared as everywhere."""

from functools import partial

import torch
from transformers import PretrainedConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LogitsProcessorWithLoRA

from tinker_server.backends.sampler.engine.vllm_patches import targets


def _make_slots(
    self: LogitsProcessorWithLoRA,
    max_loras: int,
    lora_config: LoRAConfig,
    model_config: PretrainedConfig | None = None,  # noqa: ARG001 - vLLM gives it
) -> None:
    zeros = partial(torch.zeros, dtype=lora_config.lora_dtype, device=self.device)
    self.lora_a_stacked = zeros(max_loras, 1, lora_config.max_lora_rank, self.hidden_size)
    self.lora_b_stacked = zeros(max_loras, 1, self.base_layer.vocab_size, lora_config.max_lora_rank)
    mapping = self.sharded_to_full_mapping
    on_device = None if mapping is None else torch.tensor(mapping, device=self.device, dtype=torch.long)
    self.sharded_to_full_mapping_gpu = on_device


def widen_heads() -> None:
    """Apply the change, once, before a model is made."""
    targets.WIDE_HEAD.replace(_make_slots)
