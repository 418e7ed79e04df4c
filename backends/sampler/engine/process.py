"""Run the process that holds a base model's vLLM engine: `python -m tinker_server.backends.sampler.engine.process FD`.

Each sequence of a task becomes an engine request of its own when it is admitted. The process ends when the engine
dies, so that the server notices.
"""

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends import tasks
from tinker_server.backends.formats.expert_routing import RoutingFiles
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import DRAWN_TOKENS, ModelSpec
from tinker_server.backends.processes.heap import give_back_memory
from tinker_server.backends.processes.later_forks import keep_copy
from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.processes.rpc import OnPart, end_with_server, exit_now, serve_async
from tinker_server.backends.protocol import ChatTask, ChatUsage, EngineBatch, EngineUse, SamplingTask
from tinker_server.backends.sampler.commands import (
    Chat,
    CountProgress,
    CountSequences,
    Publish,
    Receive,
    Sample,
    ShareRunning,
    Start,
)
from tinker_server.backends.sampler.engine.adapters import AdapterLoader
from tinker_server.backends.sampler.engine.answers import answer
from tinker_server.backends.sampler.engine.chat.engine_client import Shared
from tinker_server.backends.sampler.engine.chat.handlers import Chats
from tinker_server.backends.sampler.engine.engine import (
    check_version,
    end_tokens,
    engine_args,
    require_shared_memory,
    with_own_links,
)
from tinker_server.backends.sampler.engine.fair_admission import FairAdmission
from tinker_server.backends.sampler.engine.grammars import Grammars
from tinker_server.backends.sampler.engine.requests import THREADS, Prompt, sampling_params
from tinker_server.backends.sampler.engine.sequences import Sequences, end_process, ending_with
from tinker_server.backends.sampler.engine.versions import VersionCache
from tinker_server.backends.sampler.engine.vllm_patches.routed_experts import allow_on_cpu, keep_routing
from tinker_server.backends.sampler.engine.vllm_patches.targets import ENGINE_CONTEXT, MODEL_INSPECTION
from tinker_server.backends.sampler.received import ReceivedWeights

_MODEL, _VERSIONS = "model", "versions"
"""Folders of an engine's scratch directory: links to the base's files, and to those of weights in use."""
_WATCH_S = 0.2
_GIVE_BACK_S = 60.0
"""Interval at which freed memory is given back while there is work. It takes 0.1 to 0.2 ms for each MiB."""
_EMIT_S = 0.01
_BATCH_S = 0.2
"""Longest wait for the engine's batch, which comes between steps; less than the server waits (`client.py`)."""


class SamplerProcess:
    """Feeds one engine. Any number of `sample` calls may run at once."""

    def __init__(self, spec: ModelSpec, engine: AsyncLLM, renderer: Renderer, weights: VersionCache) -> None:
        self._engine = engine
        self._renderer = renderer
        self._context = spec.max_context_length
        self._sequences = Sequences(engine)
        self._weights = weights
        self.received = ReceivedWeights(spec.received_dir)
        self._publishing = asyncio.Lock()
        self._placeholders = sorted(renderer.family.placeholders)
        self._end_tokens = end_tokens(renderer, spec.directory)
        writer = "" if spec.engine is None else str(spec.engine)
        self._routing = None if spec.routing_dir is None else RoutingFiles(spec.routing_dir, writer=writer)
        self._admission = FairAdmission(spec.max_concurrent_samples, spec.adapter_slots)
        grammars = Grammars(spec.name, engine.renderer.tokenizer, engine.model_config.get_vocab_size())
        admission, ends = self._admission, self._end_tokens
        shared = Shared(self._sequences, admission, weights, renderer, ends, self._placeholders, grammars)
        self._chats = Chats(engine, shared)
        self._tasks_done = 0
        self._batch: EngineBatch | None = None
        self._counting: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch())
        self._giving_back = asyncio.create_task(self._give_back())

    @classmethod
    async def start(cls, spec: ModelSpec, progress: Progress | None = None) -> "SamplerProcess":
        """Load the model; `progress` gets its activity. Raises BackendFailed for another version of vLLM,
        Unavailable without room for it."""
        check_version(device=spec.device)
        require_shared_memory(spec.tensor_parallel)
        shutil.rmtree(spec.scratch_dir, ignore_errors=True)
        spec = with_own_links(spec, spec.scratch_dir / _MODEL)
        renderer = Renderer(
            spec.directory,
            image_cache_bytes=spec.image_cache_bytes,
            max_image_pixels=spec.max_image_pixels,
            pixel_dtype=getattr(torch, spec.dtype),
        )
        progress, began_s = progress or Progress(), time.monotonic()
        progress.does("reads weights and prepares kernels")
        await asyncio.sleep(_EMIT_S)  # the report is sent before the engine blocks the event loop
        if spec.device == "cpu" and spec.routing_dir is not None:
            allow_on_cpu()
        engine = AsyncLLM.from_engine_args(engine_args(spec, renderer.family.vision))
        placeholders = sorted(renderer.family.placeholders)
        await engine.collective_rpc("patch_runner", args=(placeholders,))
        phases, *_ = await engine.collective_rpc("phase_ages")
        progress.did([("starts vLLM", time.monotonic() - began_s), *map(tuple, phases)])
        weights = VersionCache(spec.scratch_dir / _VERSIONS, AdapterLoader(engine, renderer, spec.dtype))
        return cls(spec, engine, renderer, weights)

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """Implement `protocol.Sampler.sample`."""
        task = replace(task, weights=self.received.local(task.weights))
        prompt = Prompt(self._renderer, task.prompt, task.owner)
        async with self._weights.hold(task.weights) as held:

            async def sequence(index: int) -> RequestOutput:
                async with self._admission.admission(task.owner, task.weights) as num_before:
                    lora = await self._weights.load(held)
                    rendered, inputs = await prompt.render()
                    most_tokens = max(DRAWN_TOKENS, self._context - len(rendered.token_ids_T))
                    params = sampling_params(task, index, self._end_tokens, self._placeholders, most_tokens)
                    return await self._sequences.final(inputs, params, lora, num_before)

            outputs = await tasks.gather(map(sequence, range(task.first, task.first + task.num_samples)))
            rendered, _ = await prompt.render()
            if self._routing is not None and (model_id := self._weights.model_id(held)):
                keep = partial(keep_routing, self._routing, (task.owner, model_id, task.request_id))
                drawn = [output.outputs[0] for output in outputs]
                await THREADS.run(task.owner, keep, rendered, drawn, task.first)
        self._tasks_done += 1
        return answer(task, rendered, outputs)

    async def chat(self, task: ChatTask, emit: Callable[[str], None]) -> ChatUsage:
        """Implement `protocol.Sampler.chat`."""
        usage = await self._chats.answer(replace(task, weights=self.received.local(task.weights)), emit)
        self._tasks_done += 1
        return usage

    async def publish(self, weights: Path, *, only_reads: bool) -> None:
        """Implement `protocol.Sampler.publish`, or its first part alone. Adapters are published one at a time, in a
        sequence and a slot that the engine reserves for it: publishing neither waits for samples nor delays them."""
        weights = self.received.require(weights)
        async with self._weights.hold(weights) as held, self._publishing:
            await (self._weights.fill(held) if only_reads else self._weights.load(held))
        self._tasks_done += 1

    async def count_progress(self) -> int:
        """Return the number of the engine's steps and of tasks done."""
        steps, *_ = await self._engine.collective_rpc("count_steps")
        return int(steps) + self._tasks_done

    def share_running(self, elsewhere: dict[str, int]) -> dict[str, int]:
        """Note each owner's running sequences in other engines; return those in this one."""
        self._admission.elsewhere = elsewhere
        return self._admission.running

    async def count_sequences(self) -> EngineUse:
        """Return the engine's load. While a long step runs, the engine's own batch is as of its last answer: it answers
        between steps."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self._count_batch())
        await asyncio.wait({self._counting}, timeout=_BATCH_S)
        return replace(self._admission.use, batch=self._batch)

    async def _count_batch(self) -> None:
        with self.ending_with_engine():
            self._batch = EngineBatch(*await self._engine.engine_core.call_utility_async("count_batch"))

    async def _watch(self) -> None:
        while not self._engine.errored:  # noqa: ASYNC110 - vLLM has a flag but no event
            await asyncio.sleep(_WATCH_S)
        end_process()

    async def _give_back(self) -> None:
        done = 0
        while True:
            await asyncio.sleep(_GIVE_BACK_S)
            if done != self._tasks_done:
                done = self._tasks_done
                give_back_memory()
                with self.ending_with_engine():
                    await self._engine.collective_rpc("give_back_memory")

    def ending_with_engine(self) -> AbstractContextManager[None]:
        """End the process if the block fails because the engine is dead."""
        return ending_with(self._engine)


async def serve_engine() -> None:
    """Serve the server's commands until it closes its end."""
    started: list[SamplerProcess] = []

    async def handle(
        command: Start | Sample | Chat | Publish | Receive | CountProgress | CountSequences | ShareRunning, emit: OnPart
    ) -> SampleResponse | ChatUsage | EngineUse | dict[str, int] | int | None:
        if isinstance(command, Start):
            started.append(await SamplerProcess.start(command.spec, Progress(emit)))
            return None
        with started[0].ending_with_engine():
            match command:
                case Sample(task):
                    return await started[0].sample(task)
                case Chat(chat):
                    return await started[0].chat(chat, emit)
                case Publish(weights, only_reads):
                    await started[0].publish(weights, only_reads=only_reads)
                    return None
                case Receive(weights, files):
                    await asyncio.to_thread(started[0].received.receive, weights, files)
                    return None
                case CountProgress():
                    return await started[0].count_progress()
                case CountSequences():
                    return await started[0].count_sequences()
                case ShareRunning(elsewhere):
                    return started[0].share_running(elsewhere)

    end_with_server()
    await serve_async(handle)
    exit_now()


def main() -> None:
    """Run this process, as a fork that has its libraries. The engine beneath it is a fork too."""
    copies = keep_copy()
    ENGINE_CONTEXT.replace(lambda: copies)
    MODEL_INSPECTION.replace(copies.call)  # this process begins no CUDA, as modules of models do
    asyncio.run(serve_engine())


if __name__ == "__main__":
    asyncio.run(serve_engine())
