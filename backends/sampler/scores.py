"""The engine's own log probabilities of a short text, beside all turns: for weights that nobody samples from yet."""

import itertools

import numpy as np
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=0,
    detokenize=False,
    ignore_eos=True,
    prompt_logprobs=0,
    flat_logprobs=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
_ids = itertools.count()


async def score(engine: AsyncLLM, token_ids: list[int], adapter: LoRARequest | None) -> np.ndarray:
    """[T - 1] nats: of each token after the first."""
    inputs, name = tokens_input(token_ids), f"score-{next(_ids)}"
    async for output in engine.generate(inputs, _PARAMS.clone(), name, lora_request=adapter, priority=-1):
        logprobs = output.prompt_logprobs
    return np.array(logprobs.logprobs)
