"""The norms of DeepSeek-V3's latents with the epsilon of transformers: vLLM 0.32 gives them the config's, which is that
of the other norms alone."""

from torch import nn
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention, DeepseekV2MLAAttention

from tinker_server.backends.families.deepseek_v3 import NORM_EPSILON


def set_latent_norms(model: nn.Module) -> None:
    """Set the epsilon in a model that was loaded."""
    for attention in model.modules():
        if isinstance(attention, DeepseekV2Attention | DeepseekV2MLAAttention):
            attention.kv_a_layernorm.variance_epsilon = NORM_EPSILON
            if attention.q_lora_rank is not None:
                attention.q_a_layernorm.variance_epsilon = NORM_EPSILON
