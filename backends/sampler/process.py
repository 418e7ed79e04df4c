"""The process that holds a base model's vLLM engine: `python -m backends.sampler.process FD`.

One `sample` call is one request; its sequences become engine requests of their own, at most
`max_concurrent_samples` at a time. The process ends when the engine dies, so that the server sees it.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from transformers import GenerationConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from api_schemas.inputs import ImageChunk, ModelInput
from api_schemas.sampling import SampleRequest, SampleResponse
from backends.children import serve_async
from backends.families.family import Vision
from backends.families.lora_names import ENGINE_MODULES
from backends.protocol import BackendFailed, InvalidInput
from backends.rendering import Rendered, Renderer
from backends.sampler.adapters import MAX_ADAPTERS, EngineAdapters
from backends.sampler.checks import MAX_TOPK, check_sample
from backends.sampler.commands import Sample, SamplerConfig, Start
from backends.sampler.requests import engine_input, response, sampling_params
from backends.sources import kv_bytes_per_token

log = logging.getLogger(__name__)
T = TypeVar("T")

_ADAPTER_SLOTS = 4
"""Adapters in one step of the engine; requests for more take turns."""
_WATCH_S = 0.2


class SamplerHost:
    """One engine. Every method may run many times at once."""

    def __init__(self, config: SamplerConfig, engine: AsyncLLM, renderer: Renderer) -> None:
        self._config = config
        self._engine = engine
        self._renderer = renderer
        self._adapters = EngineAdapters(engine, config.scratch_dir)
        self._end_tokens = end_tokens(renderer, config.source)
        self._free = asyncio.Semaphore(config.max_concurrent_samples)
        self._ids = itertools.count()
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, config: SamplerConfig) -> "SamplerHost":
        """Load the model. Raises BackendFailed for a KV cache that is too small."""
        renderer = Renderer(
            config.source, image_cache_bytes=config.image_cache_bytes, max_image_pixels=config.max_image_pixels
        )
        if config.device == "cpu":
            check_kv_cache(renderer, config)
        engine = AsyncLLM.from_engine_args(engine_args(config, renderer.family.vision))
        await engine.collective_rpc("install_lora_fixes")
        return cls(config, engine, renderer)

    async def sample(self, request: SampleRequest, weights: Path | None) -> SampleResponse:
        """`protocol.Sampler.sample`."""
        config = self._config
        check_sample(self._renderer, request, config.max_context_length, config.max_images_per_prompt)
        prompt = _Prompt(self._renderer, request.prompt)
        async with self._adapters.use(None if weights is None else str(weights)) as adapter:
            outputs = await _all(
                self._sequence(prompt, sampling_params(request, index, self._end_tokens), adapter)
                for index in range(request.num_samples)
            )
        return response(request, (await prompt.render())[0], outputs)

    async def _sequence(self, prompt: "_Prompt", params: SamplingParams, adapter: LoRARequest | None) -> RequestOutput:
        """One sequence, once there is room. Cancelling takes it out of the engine."""
        async with self._free:
            _, inputs = await prompt.render()
            outputs = self._engine.generate(inputs, params, str(next(self._ids)), lora_request=adapter)
            try:
                async for output in outputs:
                    if output.finished:
                        return output
            except VLLMClientError as error:
                raise InvalidInput(f"the engine refuses the request: {error}") from None
            except EngineGenerateError as error:
                raise BackendFailed(f"the engine failed: {error.__cause__!r}") from error
            except EngineDeadError:
                end_process()
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


def engine_args(config: SamplerConfig, vision: Vision | None) -> AsyncEngineArgs:
    """How this model runs here."""
    device: dict[str, Any]
    if config.device == "cpu":
        device = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "max_num_batched_tokens": max(4096, config.max_concurrent_samples),
        }
    else:
        # Decode graphs without torch.compile: as fast as both, and up in a third of the time.
        device = {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "max_num_batched_tokens": max(8192, config.max_concurrent_samples),
        }
    if vision is not None:
        device |= vision.engine_options(config.max_images_per_prompt)
    return AsyncEngineArgs(
        model=config.source,
        dtype=config.dtype,
        # Samples without a seed of their own should not repeat when the engine starts again.
        seed=secrets.randbelow(2**31),
        max_model_len=config.max_context_length,
        max_num_seqs=config.max_concurrent_samples,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=3 * MAX_TOPK,  # likeliest, chosen and drawn tokens
        enable_lora=True,
        max_lora_rank=config.max_lora_rank,
        max_loras=_ADAPTER_SLOTS,
        max_cpu_loras=MAX_ADAPTERS,
        lora_target_modules=list(ENGINE_MODULES),
        worker_extension_cls="backends.sampler.worker_fixes.WorkerExtension",
        disable_log_stats=True,
        enable_log_requests=False,
        **device,
    )


def check_kv_cache(renderer: Renderer, config: SamplerConfig) -> None:
    """The engine refuses a cache that cannot hold one whole context, but only deep in another process."""
    token_bytes = kv_bytes_per_token(renderer.config.get_text_config(), config.dtype)
    num_tokens = config.kv_cache_bytes // token_bytes
    if num_tokens < config.max_context_length:
        raise BackendFailed(
            f"kv_cache_bytes {config.kv_cache_bytes} holds {num_tokens} tokens, less than the context window of"
            f" {config.max_context_length}: set it to {token_bytes * config.max_context_length} or more,"
            " or set a smaller max_context_length"
        )


def end_tokens(renderer: Renderer, source: str) -> list[int]:
    """What stops a sequence when the request says nothing: as the model's generation config says, else its config."""
    ids = None
    with contextlib.suppress(OSError):
        ids = GenerationConfig.from_pretrained(source).eos_token_id
    if ids is None:
        ids = renderer.config.get_text_config().eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def end_process() -> None:
    """The engine is dead: end at once, which the server sees and answers by starting another."""
    log.error("the vLLM engine died")
    os._exit(1)


async def main() -> None:
    hosts: list[SamplerHost] = []

    async def handle(command: Start | Sample) -> SampleResponse | None:
        match command:
            case Start(config):
                hosts.append(await SamplerHost.start(config))
                return None
            case Sample(request, weights):
                return await hosts[0].sample(request, weights)

    await serve_async(handle)
    for host in hosts:
        host.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
