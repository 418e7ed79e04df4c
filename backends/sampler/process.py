"""The process that holds a base model's vLLM engine: `python -m backends.sampler.process FD`.

One task's sequences become engine requests of their own, each when its turn comes. The process ends when the
engine dies, so that the server sees it.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from api_schemas.inputs import ImageChunk, ModelInput
from api_schemas.sampling import SampleResponse
from backends.children import serve_async
from backends.protocol import BackendFailed, EngineUse, InvalidInput, SamplingTask
from backends.rendering import Rendered, Renderer
from backends.sampler.adapters import EngineAdapters
from backends.sampler.answers import answer
from backends.sampler.commands import CountProgress, CountRows, Publish, Sample, SamplerConfig, Start
from backends.sampler.engine import check_kv_cache, check_version, end_tokens, engine_args
from backends.sampler.requests import engine_input, sampling_params, send_once
from backends.sampler.turns import Turns

log = logging.getLogger(__name__)
T = TypeVar("T")

_WATCH_S = 0.2
_SENDINGS = 3
"""Of one sequence, where the engine has forgotten an image that was left out."""


class SamplerProcess:
    """One engine and what feeds it. `sample` may run many times at once."""

    def __init__(self, config: SamplerConfig, engine: AsyncLLM, renderer: Renderer) -> None:
        self._engine = engine
        self._renderer = renderer
        self._adapters = EngineAdapters(engine, config.scratch_dir, config.dtype)
        self._publishing = asyncio.Lock()
        self._placeholders = sorted(renderer.family.placeholders)
        self._end_tokens = end_tokens(renderer, config.source)
        self._turns = Turns(config.max_concurrent_samples, config.adapter_slots)
        self._ids = itertools.count()
        self._tasks_done = 0
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, config: SamplerConfig) -> "SamplerProcess":
        """Load the model. Raises BackendFailed for a KV cache that is too small, or another version of vLLM."""
        check_version()
        renderer = Renderer(
            config.source,
            image_cache_bytes=config.image_cache_bytes,
            max_image_pixels=config.max_image_pixels,
            pixel_dtype=getattr(torch, config.dtype),
        )
        check_kv_cache(renderer, config)
        engine = AsyncLLM.from_engine_args(engine_args(config, renderer.family.vision))
        await engine.collective_rpc("install_fixes", args=(sorted(renderer.family.placeholders),))
        return cls(config, engine, renderer)

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """`protocol.Sampler.sample`."""
        prompt = _Prompt(self._renderer, task.prompt)
        async with self._adapters.hold(task.weights) as adapter:

            async def sequence(index: int) -> RequestOutput:
                async with self._turns.turn(task.owner, task.weights) as num_before:
                    lora = await self._adapters.load(adapter)
                    _, inputs = await prompt.render()
                    params = sampling_params(task, index, self._end_tokens, self._placeholders)
                    return await self._generate(inputs, params, lora, priority=num_before)

            outputs = await _all(sequence(index) for index in range(task.num_samples))
        self._tasks_done += 1
        return answer(task, (await prompt.render())[0], outputs)

    async def publish(self, weights: Path) -> None:
        """`protocol.Sampler.publish`: one at a time, in the place that the engine has for it beside its rows and slots,
        so that it neither waits for the samples of others nor holds them up."""
        async with self._publishing, self._adapters.hold(weights) as adapter:
            await self._adapters.load(adapter)
        self._tasks_done += 1

    async def count_progress(self) -> int:
        """Steps of the engine and tasks done."""
        (steps,) = await self._engine.collective_rpc("count_steps")
        return int(steps) + self._tasks_done

    def count_rows(self) -> EngineUse:
        """What the engine has to do now."""
        return self._turns.use

    async def _generate(
        self, inputs: EngineInput, params: SamplingParams, lora: LoRARequest | None, priority: int
    ) -> RequestOutput:
        """One sequence; the least `priority` has its prompt computed first. Cancelling takes it out of the engine."""
        try:
            for _ in range(_SENDINGS):
                output = await self._final_output(send_once(self._engine, inputs), params, lora, priority)
                if output.outputs[0].finish_reason != "error":
                    break
            return output
        except VLLMClientError as error:
            raise InvalidInput(f"the engine refuses the request: {error}") from None
        except EngineGenerateError as error:
            raise BackendFailed(f"the engine failed: {error.__cause__!r}") from error
        except EngineDeadError:
            end_process()
            raise

    async def _final_output(
        self, inputs: EngineInput, params: SamplingParams, lora: LoRARequest | None, priority: int
    ) -> RequestOutput:
        outputs = self._engine.generate(inputs, params, str(next(self._ids)), lora_request=lora, priority=priority)
        async for output in outputs:
            if output.finished:
                return output
        raise BackendFailed("the engine ended a request without a result")

    async def _watch(self) -> None:
        while not self._engine.errored:  # noqa: ASYNC110 - vLLM keeps a flag and tells nobody
            await asyncio.sleep(_WATCH_S)
        end_process()

    def shutdown(self) -> None:
        """End the engine."""
        self._watching.cancel()
        self._engine.shutdown()


class _Prompt:
    """A prompt rendered when its first sequence gets its turn, so that waiting requests hold no pixels."""

    def __init__(self, renderer: Renderer, model_input: ModelInput) -> None:
        self._renderer = renderer
        self._model_input = model_input
        self._lock = asyncio.Lock()
        self._result: tuple[Rendered, EngineInput] | None = None

    async def render(self) -> tuple[Rendered, EngineInput]:
        """The prompt in our terms and in the engine's. Raises InvalidInput for pixels that do not decode."""
        async with self._lock:
            if self._result is None:
                has_images = any(isinstance(chunk, ImageChunk) for chunk in self._model_input.chunks)
                self._result = await asyncio.to_thread(self._render) if has_images else self._render()
            return self._result

    def _render(self) -> tuple[Rendered, EngineInput]:
        rendered = self._renderer.render(self._model_input, "prompt")
        vision = self._renderer.family.vision
        return rendered, engine_input(rendered, {} if vision is None else vision.engine_fields)


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results in order; the first failure, or a cancellation, stops them all."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def end_process() -> None:
    """The engine is dead: end at once, which the server sees and answers by starting another."""
    log.error("the vLLM engine died")
    os._exit(1)


async def main() -> None:
    """Serve the server's commands until it closes its end."""
    started: list[SamplerProcess] = []

    async def handle(
        command: Start | Sample | Publish | CountProgress | CountRows,
    ) -> SampleResponse | EngineUse | int | None:
        match command:
            case Start(config):
                started.append(await SamplerProcess.start(config))
                return None
            case Sample(task):
                return await started[0].sample(task)
            case Publish(weights):
                await started[0].publish(weights)
                return None
            case CountProgress():
                return await started[0].count_progress()
            case CountRows():
                return started[0].count_rows()

    await serve_async(handle)
    for process in started:
        process.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
