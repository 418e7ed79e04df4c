"""Heads with adapters that vLLM 0.32 does not give them: Gemma 2's, which is no module there, and those of more than
258,048 tokens (Gemma 3), a limit of kernels that vLLM has no longer. Slots and scores are compared as everywhere."""

from collections.abc import Callable
from functools import partial

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM

from backends.sampler.engine.vllm_patches import targets


def _with_head(make: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Gemma2ForCausalLM, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # vLLM reads this
        make(self, vllm_config=vllm_config, prefix=prefix)
        head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix="lm_head")
        self.lm_head = head.tie_weights(self.model.embed_tokens)

    return initialise


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


def give_heads_adapters() -> None:
    """Apply the changes, once, before a model is made."""
    targets.WIDE_HEAD.replace(_make_slots)
    targets.GEMMA2_HEAD.replace(_with_head(Gemma2ForCausalLM.__init__))
