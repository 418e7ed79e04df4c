"""Text-only decoders: every model that transformers loads as a causal language model."""

from collections.abc import Mapping, Sequence

import numpy as np
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from tinker_server.backends.families import deepseek_v3, gpt_oss, nemotron_h
from tinker_server.backends.families.family import ImageSpan, LoraFlag
from tinker_server.backends.families.lora_names import decoder_modules

_ROUTER = "model.layers.*.mlp.gate"
_SHARED_EXPERT_GATE = "model.layers.*.mlp.shared_expert_gate"
FROZEN_OF_MIXTURES: dict[str, tuple[str, ...]] = {
    "Qwen3MoeForCausalLM": (_ROUTER,),
    "Qwen3NextForCausalLM": (_ROUTER, _SHARED_EXPERT_GATE),
    "Qwen2MoeForCausalLM": (_ROUTER, _SHARED_EXPERT_GATE),
    "MixtralForCausalLM": (_ROUTER,),
    gpt_oss.ARCHITECTURE: (gpt_oss.ROUTER,),
    deepseek_v3.ARCHITECTURE: (_ROUTER,),
    nemotron_h.ARCHITECTURE: (nemotron_h.ROUTER,),
}
"""Mixtures of experts whose engine and trainer are known to agree, and their modules that nothing trains."""
WITHOUT_FP8 = (gpt_oss.ARCHITECTURE, nemotron_h.ARCHITECTURE)
"""Decoders whose files in fp8 are refused, and whose others are not made fp8."""
UNSHARED = {gpt_oss.ARCHITECTURE: gpt_oss.UNSHARED}
WITH_MIXED_WINDOWS = ("gemma2", "gemma3_text", "gpt_oss", "exaone4", "cohere2")
"""Types of decoders in which trainer and engine both have a window in some layers alone. Of others vLLM has a single
window for all layers or none (Qwen2 MoE: 3.2 nats beyond the window were measured), or fails at an assertion (Qwen2,
Qwen3), or transformers has none (Llama)."""
WITH_DELTA_RULE = ("Qwen3NextForCausalLM",)


class Text:
    """`Family` of models that take no images."""

    vision = None
    sees_whole_images = False
    placeholders: Mapping[int, str] = {}
    model_class: type[_BaseAutoModelClass] = AutoModelForCausalLM

    def __init__(self, architecture: str = "") -> None:
        """`architecture` is the name in the model's config."""
        self.needs_bfloat16_on_cpu = architecture in WITH_DELTA_RULE
        self.has_state_space = architecture == nemotron_h.ARCHITECTURE
        self.has_linear_attention = self.needs_bfloat16_on_cpu or self.has_state_space
        self.has_latent_attention = architecture == deepseek_v3.ARCHITECTURE
        self.repeats_key_heads = architecture != gpt_oss.ARCHITECTURE
        self.unshared = UNSHARED.get(architecture)
        self._is_mixture = architecture in FROZEN_OF_MIXTURES
        self.frozen: Sequence[str] = FROZEN_OF_MIXTURES.get(architecture, ())

    def attention(self, decoder: str) -> str:
        """Return the decoder's: there is nothing else."""
        return decoder

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """Return [1, T] int64."""
        return np.arange(length)[None]

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """Return the decoder's attention, MLP and experts, and the head."""
        return decoder_modules(
            model,
            experts=self._is_mixture,
            linear_attention=self.has_linear_attention,
            latent_attention=self.has_latent_attention,
        )
