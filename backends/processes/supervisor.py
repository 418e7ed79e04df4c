"""Keep a group of child processes running: start, watch, end and restart it. Knows nothing of what they compute."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tinker_server.backends import tasks
from tinker_server.backends.processes.rpc import STOP_S, Child, ChildBroke, ChildDied, Command
from tinker_server.backends.protocol import BackendFailed, Loading, OnLoading, ProcessState, ignore_loading

log = logging.getLogger(__name__)
R = TypeVar("R")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before processes that did not start, or ended soon, are started again; it doubles each time."""
GRACE_S = 1
"""Time for processes to end by themselves when another of their group has failed."""
_STARTS = "starts"
"""The first phase: imports, and what a process waits for before it gets a command."""
_ON_THE_WAY_S = 1.0
"""Time in which a report arrives."""
_PROGRESS_S = 15
"""Time between two checks of progress."""


@dataclass(frozen=True)
class Silence:
    """The limit after which a process that has work and makes no progress is ended."""

    limit_s: float
    is_busy: Callable[[], bool]
    progress: Callable[[Child], Awaitable[int]]
    """Asks a process for a number that changes with its progress."""


class Supervisor:
    """A group of processes, which start and end together: when any dies, the others are ended."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[list[Child]]],
        prepare: Callable[[list[Child]], Awaitable[None]],
        *,
        restart: Callable[[], Awaitable[object]] | None = None,
        silence: Silence | None = None,
    ) -> None:
        """`name` is the group's in the log. `prepare` makes processes that have just been started ready for work.
        `restart` is awaited after a death and calls `running`; without it, the group is started again when somebody
        else calls that."""
        self.children: list[Child] = []
        """The processes that are ready; empty while there are none."""
        self.num_failed_starts = 0
        """Number of starts that failed since the group was last ready."""
        self._on_loading: OnLoading = ignore_loading
        self._phases: list[tuple[str, float]] = []
        """What the first process of the start has done, and when it began that."""
        self._num_certain = 0
        """Number of the first phases that none will replace."""
        self._name, self._start_processes, self._prepare = name, start, prepare
        self._restart, self._silence = restart, silence
        self._latest: list[Child] = []
        self._starting: asyncio.Task[list[Child]] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._pause_s = 0.0
        """Pause before the next restart after a death."""
        self._num_restarts = 0
        self._restarted = asyncio.Condition()

    async def start(self, on_loading: OnLoading) -> None:
        """Start the group. `on_loading` is called during this start and later starts. Raises BackendFailed."""
        self._on_loading = on_loading
        await self._start()

    def on_loading(self, process: str, loading: Loading | None) -> None:
        """Implement OnLoading: note the phases of a start, and pass the report on."""
        if loading is not None and process in (child.name for child in self._latest[:1]):
            self._note_phase(loading.doing, loading.began_s_ago)
        self._on_loading(process, loading)

    async def stop(self) -> None:
        """End the group for good."""
        tasks = [task for task in (self._starting, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.end(STOP_S)

    @property
    def is_alive(self) -> bool:
        """Return whether the group is ready and no process of it has died."""
        return bool(self.children) and not any(child.died.is_set() for child in self.children)

    def processes(self) -> list[ProcessState]:
        """Return the states of the processes that were started last."""
        return [
            ProcessState(child.name, child.process.pid, not child.died.is_set(), self._num_restarts)
            for child in self._latest
        ]

    async def running(self) -> list[Child]:
        """Return the living group. The first caller after a death starts it again, and all wait for it, however
        many attempts that takes."""
        if self.is_alive:
            return self.children
        if self._starting is None or self._starting.done():
            name = f"start of {self._name}"
            self._starting = asyncio.create_task(self._start_again(), name=name, context=Context())
        return await asyncio.shield(self._starting)

    async def wait_for_restart(self, seen: int) -> int:
        """Wait until the group has been restarted more than `seen` times; return how many times it has been."""
        async with self._restarted:
            await self._restarted.wait_for(lambda: self._num_restarts > seen)
            return self._num_restarts

    async def end(self, grace_s: float = GRACE_S) -> None:
        """End the group, and wait until all processes that are being ended are gone."""
        children, self.children = self.children, []
        await self._end(children, grace_s)

    async def _end(self, children: Sequence[Child], grace_s: float) -> None:
        """End it, in tasks of its own even if the caller is cancelled: no process is left behind."""
        for child in children:
            task = asyncio.create_task(child.stop(grace_s), name=f"end of {child.name}", context=Context())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _start_again(self) -> list[Child]:
        await self.end()
        pause_s = FIRST_PAUSE_S
        while True:
            log.warning("restarting %s", self._name)
            try:
                await self._start()
            except (BackendFailed, OSError) as error:
                self.num_failed_starts += 1
                log.error("%s failed to start, retrying in %s s: %s", self._name, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self.num_failed_starts = 0
            async with self._restarted:
                self._num_restarts += 1
                self._restarted.notify_all()
            return self.children

    async def _start(self) -> None:
        began, children = time.monotonic(), list[Child]()
        self._phases, self._num_certain = [(_STARTS, began)], 1
        try:
            self._on_loading(self._name, Loading(_STARTS))
            try:
                self._latest = children = await self._start_processes()
            finally:
                self._on_loading(self._name, None)
            for child in children:
                self.on_loading(child.name, Loading(_STARTS))
            await self._prepare(children)
        except BaseException:
            await self._end(children, GRACE_S)
            raise
        finally:
            for child in children:
                self.on_loading(child.name, None)
        log.info("%s is ready after %.0f s: %s", self._name, time.monotonic() - began, self._times())
        self.children = children
        if self._watching is not None:
            self._watching.cancel()
        watching = self._watch(children)
        self._watching = asyncio.create_task(watching, name=f"watch over {self._name}", context=Context())

    def _note_phase(self, doing: str, began_s_ago: float) -> None:
        began_s = time.monotonic() - began_s_ago
        if began_s_ago:  # it replaces what it is a part of, which was reported then
            while len(self._phases) > self._num_certain and self._phases[-1][1] > began_s - _ON_THE_WAY_S:
                self._phases.pop()
        if self._phases[-1][0] != doing:
            self._phases.append((doing, began_s))
        if began_s_ago:
            self._num_certain = len(self._phases)

    def _times(self) -> str:
        """Describe how long each phase of the start has taken."""
        ends = [began for _, began in self._phases[1:]] + [time.monotonic()]
        return ", ".join(f"{doing} {end - began:.0f} s" for (doing, began), end in zip(self._phases, ends, strict=True))

    async def _watch(self, children: Sequence[Child]) -> None:
        """End the group once a process of it has died or is silent, then have it started again."""
        began = time.monotonic()
        await self._wait_for_failure(children)
        await self.end()
        if self._restart is None:
            return
        lived_long = time.monotonic() - began > LONGEST_PAUSE_S
        self._pause_s = 0 if lived_long else min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        await asyncio.sleep(self._pause_s)
        await self._restart()

    async def _wait_for_failure(self, children: Sequence[Child]) -> None:
        deaths = [asyncio.create_task(child.died.wait()) for child in children]
        silences = [] if self._silence is None else [_wait_for_silence(child, self._silence) for child in children]
        waiting = [*deaths, *map(asyncio.create_task, silences)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


async def call_all(
    children: Sequence[Child],
    commands: Sequence[Command[R]],
    patience_s: float,
    on_loading: OnLoading = ignore_loading,
    *,
    agreed: bool = True,
) -> R:
    """Have each process do its command. Return the first answer, once every process has answered.

    Raises the error that the processes agree on, and ChildDied or ChildBroke as soon as a process will not answer, or
    has failed by itself. If errors are not `agreed`, others may wait for the process that fails: the first is raised.
    """
    answers = (
        child.call(command, patience_s, partial(on_loading, child.name))
        for child, command in zip(children, commands, strict=True)
    )
    if len(children) == 1:  # needs no task
        return await next(answers)
    async with tasks.running(answers) as calls:
        waiting = set(calls)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                error = call.exception()
                if error is not None and (not agreed or isinstance(error, ChildDied | ChildBroke)):
                    raise error
    errors = [call.exception() for call in calls]
    if len({type(error) for error in errors}) > 1:
        raise ChildBroke(f"the ranks do not agree: {errors}")
    return calls[0].result()


async def _wait_for_silence(child: Child, silence: Silence) -> None:
    seen, since = -1, time.monotonic()
    while True:
        await asyncio.sleep(min(_PROGRESS_S, silence.limit_s / 4))
        now = time.monotonic()
        if not silence.is_busy():
            since = now
        elif now - since > silence.limit_s:
            log.error("ending %s: no progress for %.0f s", child.name, now - since)
            return
        else:
            with contextlib.suppress(TimeoutError, BackendFailed):
                async with asyncio.timeout(silence.limit_s - (now - since)):
                    progress = await silence.progress(child)
                if progress != seen:
                    seen, since = progress, time.monotonic()
