"""A head that LoRA finds: vLLM 0.32 gives Gemma 2 no module for it, and multiplies by the embeddings instead."""

from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM

from backends.sampler.vllm_patches import targets


def _with_head(make: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Gemma2ForCausalLM, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # vLLM reads this
        make(self, vllm_config=vllm_config, prefix=prefix)
        head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix="lm_head")
        self.lm_head = head.tie_weights(self.model.embed_tokens)

    return initialise


def name_heads() -> None:
    """Apply the change, once, before a model is made."""
    targets.GEMMA2_HEAD.replace(_with_head(Gemma2ForCausalLM.__init__))
