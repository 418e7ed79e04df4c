"""The server's side of the vLLM sampler: one child process per base model, started again when it dies or hangs.

Imports no vLLM: the engine is in the child (`process.py`) and in a further process that vLLM starts. A task
waits until there is an engine, however long that takes; only one that kills engines itself fails (`trials.py`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from api_schemas.inputs import EncodedTextChunk, ModelInput
from api_schemas.sampling import SampleResponse, SamplingParams
from backends.processes.launcher import launch_sampler, sampler_name
from backends.processes.rpc import Child, ChildDied, Command
from backends.protocol import (
    BackendFailed,
    ChatTask,
    ChatUsage,
    EngineUse,
    Loading,
    LoadingHearer,
    ProcessState,
    SamplingTask,
    unheard,
)
from backends.sampler.commands import Chat, CountProgress, CountRows, Publish, Sample, SamplerConfig, Start
from backends.sampler.crash_isolation import EngineDied, Trials

log = logging.getLogger(__name__)
R = TypeVar("R")

_PROGRESS_S = 15
"""Between two looks at whether the engine gets on."""
_PROMPT_S = 0.5
"""For an answer that is there at once, or not worth waiting for."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1, 60
"""Between tries to start an engine that does not start, each pause twice the one before."""
_FIRST_TASK = SamplingTask(
    prompt=ModelInput(chunks=[EncodedTextChunk(tokens=np.zeros(1, np.int64))]),
    params=SamplingParams(max_tokens=1),
    num_samples=1,
    weights=None,
    owner="",
)
"""An engine that cannot do this is no engine: no request is to blame for its death."""


class SamplerClient:
    """`protocol.Sampler`."""

    def __init__(self, config: SamplerConfig, launch: Callable[..., Awaitable[Child]] = launch_sampler) -> None:
        self._config = config
        self._launch = launch
        self._child: Child | None = None
        self._starts = 0
        self._starting: asyncio.Task[Child] | None = None
        self._watching: dict[Child, asyncio.Task[None]] = {}
        """Every child that has not been cleared away."""
        self._trials = Trials(self._running)
        self._hear: LoadingHearer = unheard

    async def start(self, hear: LoadingHearer = unheard) -> None:
        """Returns once the engine can sample. `hear` is told of this and of later starts. Raises BackendFailed."""
        self._hear = hear
        await self._start()

    async def stop(self) -> None:
        """End the child and its engine."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        watching, self._watching = self._watching, {}
        for child, task in watching.items():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await child.stop()
        self._child = None

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """As the protocol says."""
        return await self._run(task.owner, Sample(task))

    async def publish(self, weights: Path, owner: str) -> None:
        """As the protocol says."""
        await self._run(owner, Publish(weights, owner))

    def processes(self) -> list[ProcessState]:
        """The one that was started last."""
        child, restarts = self._child, max(0, self._starts - 1)
        return [] if child is None else [ProcessState(child.name, child.process.pid, not child.died.is_set(), restarts)]

    async def engine_use(self) -> EngineUse | None:
        """As the protocol says of a base model."""
        if self._child is None:
            return None
        try:
            async with asyncio.timeout(_PROMPT_S):
                return await self._child.call(CountRows())
        except (TimeoutError, BackendFailed):
            return None

    async def chat(self, task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
        """As the protocol says."""
        return await self._run(task.owner, Chat(task), tell)

    async def _run(self, owner: str, command: Command[R], tell: Callable[[str], None] | None = None) -> R:
        told = False

        def hear(part: str) -> None:
            nonlocal told
            told = True
            assert tell is not None
            tell(part)

        async def work(child: Child) -> R:
            try:
                return await child.call(command, hear=None if tell is None else hear)
            except ChildDied:
                if child is self._child:
                    self._child = None
                    self._trials.engine_died()
                if told:  # another answer would not begin as this one did
                    raise BackendFailed("the engine died while it answered; send the request again") from None
                raise EngineDied from None

        return await self._trials.run(owner, work)

    async def _running(self) -> Child:
        """The living child; the first caller after its death starts another, and all wait for that."""
        if self._child is not None and not self._child.died.is_set():
            return self._child
        if self._starting is None or self._starting.done():
            name = f"start of sampler {self._config.name}"
            self._starting = asyncio.create_task(self._start_again(), name=name, context=Context())
        return await asyncio.shield(self._starting)

    async def _start_again(self) -> Child:
        pause_s = _FIRST_PAUSE_S
        while True:
            log.error("%s: the sampler process died and is started again", self._config.name)
            try:
                return await self._start()
            except BackendFailed as error:
                log.error("%s: %s; samples wait, the next try is in %s s", self._config.name, error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _start(self) -> Child:
        name, began = self._config.name, time.monotonic()
        self._starts += 1
        tell = partial(self._hear, sampler_name(name))
        try:
            tell(Loading("starts"))
            child = await self._launch(name, device=self._config.device, gpus=self._config.gpus)
            try:
                await child.call(Start(self._config), hear=tell)
                tell(Loading("draws a first token"))
                await child.call(Sample(_FIRST_TASK))
            except BaseException:
                await child.stop(grace_s=1)
                raise
        finally:
            tell(None)
        log.info("%s: the sampler is ready after %.0f s", name, time.monotonic() - began)
        self._child = child
        watching = self._watch(child)
        self._watching[child] = asyncio.create_task(watching, name=f"watch over sampler {name}", context=Context())
        return child

    async def _watch(self, child: Child) -> None:
        """End a child that has work and does not get on with it; and clear away one that has died."""
        patience_s = self._config.silence_s
        seen, since = -1, time.monotonic()
        while not child.died.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_PROGRESS_S, patience_s / 4)):
                    await child.died.wait()
            now = time.monotonic()
            if not self._trials.is_busy:
                since = now
                continue
            if now - since > patience_s:
                log.error("%s: the sampler has not got on for %.0f s and is ended", self._config.name, now - since)
                break
            with contextlib.suppress(TimeoutError, ChildDied):
                async with asyncio.timeout(patience_s - (now - since)):
                    progress = await child.call(CountProgress())
                if progress != seen:
                    seen, since = progress, time.monotonic()
        await child.stop(grace_s=0)
        self._watching.pop(child, None)
