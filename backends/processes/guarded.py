"""Processes that end with this process, each together with all that it has started.

Each leads a session of its own: Ctrl-C reaches the server alone. A guard in that session ends everything there at once
when this process is gone, for whatever reason: Linux's parent-death signal would reach the process, but not those that
vLLM starts beneath it.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import IO, Self

log = logging.getLogger(__name__)
GUARD = "exec </proc/self/fd/$0; read -r _; kill -s KILL 0"
"""The guard waits on a pipe whose other end only the server holds. It is part of the group that it ends, so the group's
number cannot be reused before."""
_GUARDED = f'({GUARD}) & exec "$@"'
"""The shell itself becomes the child."""


class Guarded:
    """A started process. It ends with this process, and all that it has started ends with it."""

    folder: str | None = None
    """A directory of its own, which is removed when it has ended."""

    def __init__(self, name: str, pid: int, wait: Callable[[], Awaitable[int | None]], guard: IO[str]) -> None:
        """`wait` may be called at any time, by several tasks."""
        self.name, self.pid = name, pid
        self._wait, self._guard = wait, guard

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int] = ()) -> Self:
        """Run a command with exactly these variables; `fds` stay open in it."""
        guarding, guard = make_guard_pipe()
        with contextlib.ExitStack() as unless_started:  # a start that is cancelled ends what it has started
            unless_started.enter_context(guard)
            with os.fdopen(guarding):
                process = await asyncio.create_subprocess_exec(
                    *_shell(guarding, command),
                    pass_fds=[guarding, *fds],
                    env=env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.stderr,  # the server's own output is for its user alone
                    stderr=sys.stderr,
                    start_new_session=True,
                )
            unless_started.pop_all()
        return cls(name, process.pid, process.wait, guard)

    async def wait(self) -> int | None:
        """Wait until the process has ended by itself; return its exit code, or None for a fork of another process."""
        return await self._wait()

    def abandon(self) -> None:
        """Have the guard end it, without waiting."""
        self._guard.close()

    async def end(self, grace_s: float) -> None:
        """Wait for so many seconds until the process ends by itself, then end it and everything that it started."""
        if self._guard.closed:
            return  # its number may be another's by now
        try:
            async with asyncio.timeout(grace_s):
                await self._wait()
        except TimeoutError:
            log.info("ended the %s process, which had not ended by itself within %s s", self.name, grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._wait()
        self._guard.close()
        if self.folder is not None:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


def make_guard_pipe() -> tuple[int, IO[str]]:
    """Return the end of a pipe that a guard reads, and the other: what it guards ends when that is closed."""
    guarding, guard = os.pipe()
    return guarding, os.fdopen(guard, "w")


class Server:
    """A command that serves this process for its whole life, whatever event loop runs."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], requests: int) -> None:
        """Run a command with exactly these variables, and `requests` as its standard input: the guard has no copy of
        that, so it closes as the command ends."""
        guarding, self._guard = make_guard_pipe()
        with os.fdopen(guarding):
            self._process = subprocess.Popen(
                _shell(guarding, command),
                pass_fds=[guarding],
                env=env,
                stdin=requests,
                stdout=sys.stderr,
                stderr=sys.stderr,
                start_new_session=True,
            )

    def end(self) -> None:
        """End it, and wait for its end."""
        if self._process.returncode is None:  # not yet waited for, so that the number is still its own
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._guard.close()


def _shell(guarding: int, command: Sequence[str]) -> Sequence[str]:
    return ["/bin/sh", "-c", _GUARDED, str(guarding), *command]
