"""A sequence in the engine, from its prompt to its last token: for tasks, chats and load checks alike."""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.sampler.engine.requests import engine_input, send_once

log = logging.getLogger(__name__)
_SENDINGS = 3
"""Tries of a sequence, where the engine has evicted an image that was left out."""
_SCORING = SamplingParams(
    max_tokens=1,
    temperature=0,
    detokenize=False,
    ignore_eos=True,
    prompt_logprobs=0,
    flat_logprobs=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
_score_ids = itertools.count()


class Sequences:
    """The sequences of an engine."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._ids = itertools.count()

    async def run(
        self, inputs: EngineInput, params: SamplingParams, lora: LoRARequest | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a sequence, as many as `params.output_kind` says.

        The prompt of the least `priority` is computed first. Cancelling, or closing, takes the sequence out of the
        engine. Raises InvalidInput where the engine refuses it, BackendFailed where it fails. A sequence that fails
        before its first token, as without the pixels that it was told were there, is begun again.
        """
        has_begun = False
        try:
            sendings = _SENDINGS if inputs["type"] == "multimodal" else 1
            for last in (False,) * (sendings - 1) + (True,):
                request_id, sent = str(next(self._ids)), send_once(self._engine, inputs)
                outputs = self._engine.generate(sent, params, request_id, lora_request=lora, priority=priority)
                async with aclosing(outputs):
                    async for output in outputs:
                        has_begun |= bool(output.outputs[0].token_ids)
                        if output.outputs[0].finish_reason == "error" and not (last or has_begun):
                            break
                        yield output
                    else:
                        return
        except VLLMClientError as error:
            raise InvalidInput(f"the engine refuses the request: {error}") from None
        except EngineGenerateError as error:
            raise BackendFailed(f"the engine failed: {error.__cause__!r}") from error
        except EngineDeadError:
            end_process()
            raise

    async def final(
        self, inputs: EngineInput, params: SamplingParams, lora: LoRARequest | None, priority: int
    ) -> RequestOutput:
        """Return the last output of a sequence. Raises as `run`."""
        outputs = [output async for output in self.run(inputs, params, lora, priority)]
        if not outputs:
            raise BackendFailed("the engine ended a request without a result")
        return outputs[-1]


async def score(engine: AsyncLLM, token_ids: list[int], adapter: LoRARequest | None) -> np.ndarray:
    """Return the log probability of each token after the first [T - 1], nats.

    Waits for no admission: for weights that nobody samples from yet.
    """
    return await _score(engine, tokens_input(token_ids), adapter)


async def check_scores(
    engine: AsyncLLM, load_check: LoadCheck, adapter: LoRARequest | None, renderer: Renderer, dtype: str
) -> None:
    """Raise BackendFailed where the engine, which computes in `dtype`, does not score as whoever saved the weights, and
    InvalidInput where its scores are not finite."""
    load_check.check_same(await score(engine, load_check.token_ids, adapter), dtype)
    if load_check.image:
        rendered = await asyncio.to_thread(renderer.render, load_check.behind_image, "the image of a test")
        inputs = engine_input(rendered, renderer.family.vision, "")
        logprobs = await _score(engine, inputs, adapter)
        load_check.check_same_behind_image(logprobs[-len(load_check.token_ids) :], dtype)


async def _score(engine: AsyncLLM, inputs: EngineInput, adapter: LoRARequest | None) -> np.ndarray:
    name = f"score-{next(_score_ids)}"
    async for output in engine.generate(inputs, _SCORING.clone(), name, lora_request=adapter, priority=-1):
        logprobs = output.prompt_logprobs
    return np.array(logprobs.logprobs)


@contextmanager
def ending_with(engine: AsyncLLM) -> Iterator[None]:
    """End the process where the body fails because the engine is dead: the server runs the request on the next one."""
    try:
        yield
    except Exception as error:
        if engine.errored or isinstance(error, EngineDeadError):
            end_process()
        raise


def end_process() -> None:
    """End at once. An engine crash is not a request error: the server starts another process, and retries."""
    log.error("the vLLM engine died")
    os._exit(1)
