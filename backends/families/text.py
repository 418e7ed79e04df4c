"""Text-only decoders: everything that transformers loads as a causal language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, PreTrainedModel

from backends.families.family import ImageSpan, LoraFlag
from backends.families.lora_names import decoder_modules

ROUTERS = {"Qwen3MoeForCausalLM": "model.layers.*.mlp.gate"}
"""Mixtures of experts whose engine and trainer are known to agree, and their routers, which nothing trains."""


class Text:
    """`Family` of models that see nothing."""

    vision = None
    placeholders: Mapping[int, str] = {}
    model_class: Any = AutoModelForCausalLM
    has_linear_attention = False

    def __init__(self, architecture: str = "") -> None:
        """`architecture` as the model's config names it."""
        self._is_mixture = architecture in ROUTERS
        self.frozen: Sequence[str] = (ROUTERS[architecture],) if self._is_mixture else ()

    def attention(self, decoder: str) -> str:
        """There is nothing but the decoder."""
        return decoder

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """[1, T] int64."""
        return np.arange(length)[None]

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """The decoder's attention, MLP and experts, and the head."""
        return decoder_modules(model, experts=self._is_mixture)
