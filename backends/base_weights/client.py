"""Drives the processes that hold a base model's weights, a process on each of its GPUs, for trainer and engines to map.

An engine or a rank that starts again maps the weights again. If a holder dies, what is mapped stays right, but a new
holder loads a second copy: so all that have mapped the first copy are ended before.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ParamSpec

from tinker_server.backends import tasks
from tinker_server.backends.base_weights.commands import Hold
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import StartWorkers, launch_holders
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.processes.supervisor import GRACE_S, Supervisor
from tinker_server.backends.protocol import BackendFailed, OnLoading, ProcessState

log = logging.getLogger(__name__)
P = ParamSpec("P")


class BaseWeights:
    """The one copy of a base on each of its GPUs of a machine. Without any effect for a model with two copies."""

    def __init__(self, spec: ModelSpec, start_workers: StartWorkers = launch_holders) -> None:
        """Make a directory for the sockets, if the spec has none."""
        self.spec = spec
        """The model's, with the directory in which it is held."""
        self._is_held = spec.base_copies == 1
        self._own_dir: Path | None = None
        """The directory, if it was made here."""
        self._users: list[Child] = []
        """Processes that have mapped the weights, or will."""
        self._started = asyncio.Event()
        if self._is_held and spec.base_dir is None:  # mkdtemp's directories are the user's alone
            self._own_dir = Path(tempfile.mkdtemp(prefix="tinker-base-"))
            self.spec = replace(spec, base_dir=self._own_dir)
        self._supervisor = Supervisor(
            f"{spec.name}: what holds its weights",
            partial(self._start, start_workers),
            self._load,
            restart=lambda: self._supervisor.running(),
        )

    async def start(self, on_loading: OnLoading) -> None:
        """Load the weights. Raises BackendFailed."""
        if self._is_held:
            await self._supervisor.start(on_loading)
            self._started.set()

    async def keep_starting(self, on_loading: OnLoading) -> None:
        """Load the weights, however many attempts that takes."""
        try:
            await self.start(on_loading)
        except (BackendFailed, OSError) as error:
            log.error("%s cannot be held: %s", self.spec.name, error)
            await self._supervisor.running()
            self._started.set()

    async def stop(self) -> None:
        """End the holders, after all that map their weights."""
        await self._supervisor.stop()
        if self._own_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._own_dir, ignore_errors=True)

    def processes(self) -> list[ProcessState]:
        """Return the states of the holders that were started last."""
        return self._supervisor.processes()

    def wrap_start(
        self,
        start_workers: Callable[P, Awaitable[list[Child]]],
        *,
        they_wait: bool = False,
        patience_s: float | None = None,
    ) -> Callable[P, Awaitable[list[Child]]]:
        """Return `start_workers` for processes that map the weights, and end with the holders. Either `they_wait` for
        the holders themselves, or they import beside them and do no more before the holders are there; it raises
        BackendFailed if they are not for `patience_s`."""
        if not self._is_held:
            return start_workers

        async def start(*args: P.args, **kwargs: P.kwargs) -> list[Child]:
            if they_wait:
                return self._with_users(await start_workers(*args, **kwargs))
            async with tasks.running([self._running()]) as [holders]:
                children = await start_workers(*args, **kwargs)
                try:
                    async with asyncio.timeout(patience_s):
                        await holders
                except BaseException as error:
                    await asyncio.gather(*(child.stop(GRACE_S) for child in children))
                    if isinstance(error, TimeoutError):
                        raise BackendFailed(f"{self.spec.name}: no weights are held after {patience_s} s") from None
                    raise
            return self._with_users(children)

        return start

    def _with_users(self, children: list[Child]) -> list[Child]:
        self._users = [*(user for user in self._users if not user.died.is_set()), *children]
        return children

    async def _running(self) -> None:
        """Wait until the weights are held."""
        await self._started.wait()
        await self._supervisor.running()

    async def _start(self, start_workers: Callable[[ModelSpec], Awaitable[list[Child]]]) -> list[Child]:
        users, self._users = self._users, []
        await asyncio.gather(*(user.stop(GRACE_S) for user in users))
        return await start_workers(self.spec)

    async def _load(self, holders: list[Child]) -> None:
        await asyncio.gather(
            *(
                holder.call(Hold(self.spec, gpu), on_part=partial(self._supervisor.on_loading, holder.name))
                for holder, gpu in zip(holders, self.spec.base_gpus, strict=True)
            )
        )
