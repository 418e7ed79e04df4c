"""The engine's own log probabilities of a short text, beside all turns: for weights that nobody samples from yet."""

import asyncio
import itertools

import numpy as np
from vllm.inputs import EngineInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from backends.formats.load_check import Canary
from backends.inputs.rendering import Renderer
from backends.sampler.requests import engine_input

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
    return await _score(engine, tokens_input(token_ids), adapter)


async def check_scores(
    engine: AsyncLLM, canary: Canary, adapter: LoRARequest | None, renderer: Renderer, dtype: str
) -> None:
    """Raises BackendFailed where the engine, which computes in `dtype`, does not score as who saved the weights did."""
    canary.check_same(await score(engine, canary.token_ids, adapter), dtype)
    if canary.image:
        rendered = await asyncio.to_thread(renderer.render, canary.behind_image, "the image of a test")
        inputs = engine_input(rendered, renderer.family.vision, "")
        logprobs = await _score(engine, inputs, adapter)
        canary.check_same_behind_image(logprobs[-len(canary.token_ids) :], dtype)


async def _score(engine: AsyncLLM, inputs: EngineInput, adapter: LoRARequest | None) -> np.ndarray:
    name = f"score-{next(_ids)}"
    async for output in engine.generate(inputs, _PARAMS.clone(), name, lora_request=adapter, priority=-1):
        logprobs = output.prompt_logprobs
    return np.array(logprobs.logprobs)
