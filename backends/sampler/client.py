"""Drives the vLLM sampler of one base model: one child process, started again when it dies or hangs.

Imports no vLLM: the engine is in the child (`process.py`) and in a further process that vLLM starts. A task
waits until there is an engine, however long that takes; only one that kills engines itself fails.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from api_schemas.inputs import EncodedTextChunk, ModelInput
from api_schemas.sampling import SampleResponse, SamplingParams
from backends.model_spec import ModelSpec
from backends.processes.crash_isolation import CrashIsolation, Suspect
from backends.processes.launcher import StartWorkers, launch_sampler
from backends.processes.rpc import Child, ChildDied, Command
from backends.processes.supervisor import Silence, Supervisor
from backends.protocol import (
    BackendFailed,
    ChatTask,
    ChatUsage,
    EngineUse,
    Loading,
    OnLoading,
    ProcessState,
    SamplingTask,
    ignore_loading,
)
from backends.sampler.commands import Chat, CountProgress, CountSequences, Publish, Sample, Start

R = TypeVar("R")

_ENGINE_USE_S = 0.5
"""Longest wait for an engine's use: an answer that is not there at once is not worth waiting for."""
_FIRST_TASK = SamplingTask(
    prompt=ModelInput(chunks=[EncodedTextChunk(tokens=np.zeros(1, np.int64))]),
    params=SamplingParams(max_tokens=1),
    num_samples=1,
    weights=None,
    owner="",
)
"""An engine that dies of this is no engine: no request is the culprit."""


class SamplerClient:
    """`protocol.Sampler`."""

    def __init__(self, spec: ModelSpec, start_workers: StartWorkers = launch_sampler) -> None:
        self._spec = spec
        self._isolation = CrashIsolation(is_exclusive=True)
        silence = Silence(spec.silence_s, lambda: self._isolation.is_busy, lambda child: child.call(CountProgress()))
        launch = partial(start_workers, spec)
        self._supervisor = Supervisor(f"{spec.name}: the sampler", launch, self._load, silence=silence)

    async def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """Return once the engine can sample. `on_loading` is called during this start and later ones. Raises
        BackendFailed."""
        await self._supervisor.start(on_loading)

    async def stop(self) -> None:
        """End the child and its engine."""
        await self._supervisor.stop()

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """Implement the protocol."""
        return await self._run(task.owner, Sample(task))

    async def publish(self, weights: Path, owner: str) -> None:
        """Implement the protocol."""
        await self._run(owner, Publish(weights, owner))

    def processes(self) -> list[ProcessState]:
        """Return the state of the process that was started last."""
        return self._supervisor.processes()

    async def engine_use(self) -> EngineUse | None:
        """Implement `protocol.BaseModel.engine_use`."""
        if not (children := self._supervisor.children):
            return None
        try:
            async with asyncio.timeout(_ENGINE_USE_S):
                return await children[0].call(CountSequences())
        except (TimeoutError, BackendFailed):
            return None

    async def chat(self, task: ChatTask, emit: Callable[[str], None]) -> ChatUsage:
        """Implement the protocol."""
        return await self._run(task.owner, Chat(task), emit)

    async def _run(self, owner: str, command: Command[R], emit: Callable[[str], None] | None = None) -> R:
        has_begun = False

        def on_part(part: str) -> None:
            nonlocal has_begun
            has_begun = True
            assert emit is not None
            emit(part)

        request = Suspect(owner)
        try:
            while not request.is_culprit:
                async with self._isolation.admitted(request, self._running) as child:
                    try:
                        return await child.call(command, on_part=None if emit is None else on_part)
                    except ChildDied:
                        self._isolation.crashed(child)
                        if has_begun:  # another answer would not begin as this one did
                            raise BackendFailed("the engine died while it answered; send the request again") from None
        finally:
            self._isolation.release(request)
        raise BackendFailed(
            "the engine died twice while it worked on this request, the second time on nothing else. It was started"
            " again for the others; this request is not tried a third time"
        )

    async def _running(self) -> Child:
        [child] = await self._supervisor.running()
        return child

    async def _load(self, children: list[Child]) -> None:
        [child] = children
        emit = partial(self._supervisor.on_loading, child.name)
        await child.call(Start(self._spec), on_part=emit)
        emit(Loading("draws a first token"))
        await child.call(Sample(_FIRST_TASK))
