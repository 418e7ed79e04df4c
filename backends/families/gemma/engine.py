"""Gemma 2 in vLLM 0.32 with adapters of its head, which is no module there. Slots and scores are compared as
everywhere."""

from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM

from tinker_server.backends.families.gemma import GEMMA2_HEAD


def _with_head(make: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Gemma2ForCausalLM, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # vLLM reads this
        make(self, vllm_config=vllm_config, prefix=prefix)
        head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix="lm_head")
        self.lm_head = head.tie_weights(self.model.embed_tokens)

    return initialise


def add_head() -> None:
    """Apply the change, once, before a model is made."""
    GEMMA2_HEAD.replace(_with_head(Gemma2ForCausalLM.__init__))
