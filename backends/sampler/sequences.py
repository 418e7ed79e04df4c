"""One sequence in the engine, from its prompt to its last token: for tasks and for chats alike."""

import itertools
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from backends.protocol import BackendFailed, InvalidInput
from backends.sampler.requests import send_once

log = logging.getLogger(__name__)
_SENDINGS = 3
"""Of one sequence, where the engine has forgotten an image that was left out."""


class Sequences:
    """What runs in one engine."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._ids = itertools.count()

    async def run(
        self, inputs: EngineInput, params: SamplingParams, lora: LoRARequest | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one sequence, as many as `params.output_kind` says; the least `priority` has its prompt
        computed first. Cancelling, or closing, takes it out of the engine.

        Raises InvalidInput where the engine refuses it, BackendFailed where it fails.
        """
        try:
            sendings = _SENDINGS if inputs["type"] == "multimodal" else 1
            for last in (False,) * (sendings - 1) + (True,):
                request_id, sent = str(next(self._ids)), send_once(self._engine, inputs)
                outputs = self._engine.generate(sent, params, request_id, lora_request=lora, priority=priority)
                async with aclosing(outputs):
                    async for output in outputs:
                        if output.outputs[0].finish_reason == "error" and not last:
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
        """The one output of a sequence of which only the end is asked for. Raises as `run`."""
        outputs = [output async for output in self.run(inputs, params, lora, priority)]
        if not outputs:
            raise BackendFailed("the engine ended a request without a result")
        return outputs[-1]


@contextmanager
def ending_with(engine: AsyncLLM) -> Iterator[None]:
    """What fails because the engine is dead fails nobody: the process ends, and the server runs it on the next."""
    try:
        yield
    except Exception as error:
        if engine.errored or isinstance(error, EngineDeadError):
            end_process()
        raise


def end_process() -> None:
    """The engine is dead: end at once, which the server sees and answers by starting another."""
    log.error("the vLLM engine died")
    os._exit(1)
