"""Text-only decoders: everything that transformers loads as a causal language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, PreTrainedModel

from backends.families.family import ImageSpan, LoraFlag
from backends.families.lora_names import decoder_modules

_ROUTER = "model.layers.*.mlp.gate"
_SHARED_EXPERT_GATE = "model.layers.*.mlp.shared_expert_gate"
FROZEN_OF_MIXTURES: dict[str, tuple[str, ...]] = {
    "Qwen3MoeForCausalLM": (_ROUTER,),
    "Qwen3NextForCausalLM": (_ROUTER, _SHARED_EXPERT_GATE),
    "Qwen2MoeForCausalLM": (_ROUTER, _SHARED_EXPERT_GATE),
    "MixtralForCausalLM": (_ROUTER,),
}
"""Mixtures of experts whose engine and trainer are known to agree, and what of them nothing trains."""
REFUSED = {
    "GptOssForCausalLM": "its attention has sinks, and its experts have biases and an activation of their own, none of"
    " which the trainer computes",
}
"""What is more than a matter of LoRA's reach, and why."""
WITHOUT_MIXED_WINDOWS = ("Qwen2MoeForCausalLM",)
"""Whose engine leaves windows out where not all layers have one; measured: 3.2 nats beyond the window."""
WITH_LINEAR_ATTENTION = ("Qwen3NextForCausalLM",)


class Text:
    """`Family` of models that see nothing."""

    vision = None
    placeholders: Mapping[int, str] = {}
    model_class: Any = AutoModelForCausalLM

    def __init__(self, architecture: str = "") -> None:
        """`architecture` as the model's config names it."""
        self.has_linear_attention = architecture in WITH_LINEAR_ATTENTION
        self._is_mixture = architecture in FROZEN_OF_MIXTURES
        self.frozen: Sequence[str] = FROZEN_OF_MIXTURES.get(architecture, ())

    def attention(self, decoder: str) -> str:
        """There is nothing but the decoder."""
        return decoder

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """[1, T] int64."""
        return np.arange(length)[None]

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """The decoder's attention, MLP and experts, and the head."""
        return decoder_modules(model, experts=self._is_mixture, linear_attention=self.has_linear_attention)
