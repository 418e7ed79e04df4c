"""The server's side of the vLLM sampler: one child process per base model, started again when it dies.

Imports no vLLM: the engine is in the child (`process.py`) and in a further process that vLLM starts.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from api_schemas.sampling import SampleResponse
from backends.children import Child, ChildDied
from backends.launcher import launch_sampler
from backends.protocol import BackendFailed, SamplingTask
from backends.sampler.commands import Sample, SamplerConfig, Start

log = logging.getLogger(__name__)

_MAX_STARTS, _WINDOW_S = 4, 300
"""An engine that dies at once must not be started for ever: so many starts in so many seconds."""
_PROGRESS_S = 15


class SamplerClient:
    """`protocol.Sampler`."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self._child: Child | None = None
        self._starting: asyncio.Task[Child] | None = None
        self._starts: deque[float] = deque(maxlen=_MAX_STARTS)

    async def start(self) -> None:
        """Returns once the engine can sample. Raises BackendFailed."""
        await self._running()

    async def stop(self) -> None:
        """End the child and its engine."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._child is not None:
            await self._child.stop()
            self._child = None

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """As the protocol says. A task whose engine died under it is tried once more, on a new one."""
        try:
            return await (await self._running()).call(Sample(task))
        except ChildDied:
            return await (await self._running()).call(Sample(task))

    async def _running(self) -> Child:
        """The living child; the first caller after its death starts another, and all wait for that."""
        if self._child is not None and not self._child.died.is_set():
            return self._child
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name=f"start of sampler {self._config.name}")
        return await asyncio.shield(self._starting)

    async def _start(self) -> Child:
        name = self._config.name
        if self._child is not None:
            log.error("%s: the sampler process died and is started again", name)
            await self._child.stop(grace_s=1)
            self._child = None
        now = time.monotonic()
        if len(self._starts) == _MAX_STARTS and now - self._starts[0] < _WINDOW_S:
            raise BackendFailed(f"{name}: the sampler died {_MAX_STARTS} times within {_WINDOW_S} s; try later")
        self._starts.append(now)
        child = await launch_sampler(name, device=self._config.device, gpus=self._config.gpus)
        try:
            async with _progress(name):
                await child.call(Start(self._config))
        except BaseException:
            await child.stop(grace_s=1)
            raise
        log.info("%s: the sampler is ready after %.0f s", name, time.monotonic() - now)
        self._child = child
        return child


@contextlib.asynccontextmanager
async def _progress(name: str) -> AsyncIterator[None]:
    """Say every few seconds that the engine is still loading."""

    async def report() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_S)
            log.info("%s: the sampler is loading, %.0f s so far", name, time.monotonic() - began)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()
