"""Text-only decoders: everything that transformers loads as a causal language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, PreTrainedModel

from backends.families.family import ImageSpan, LoraFlag
from backends.families.lora_names import decoder_modules


class Text:
    """`Family` of models that see nothing."""

    vision = None
    placeholders: Mapping[int, str] = {}
    model_class: Any = AutoModelForCausalLM
    frozen: Sequence[str] = ()

    def attention(self, decoder: str) -> str:
        """There is nothing but the decoder."""
        return decoder

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """[1, T] int64."""
        return np.arange(length)[None]

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """The decoder's attention and MLP, and the head."""
        return decoder_modules(model)
