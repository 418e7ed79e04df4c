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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

log = logging.getLogger(__name__)
GUARD = "exec </proc/self/fd/$0; read -r _; kill -s KILL 0"
"""The guard waits on a pipe whose other end only the server holds. It is part of the group that it ends, so the group's
number cannot be reused before."""
_GUARDED = f'({GUARD}) & exec "$@"'
"""The shell itself becomes the child."""
_DYING_S = 60.0
"""Longest time that killed processes may take to give back what they hold: hundreds of gigabytes of pinned memory."""
_LOOK_S = 0.02
"""Time between two looks at them."""


class Guarded:
    """A started process. It ends with this process, and all that it has started ends with it."""

    folder: str | None = None
    """A directory of its own, which is removed when it has ended."""

    def __init__(self, name: str, pid: int, wait: Callable[[], Awaitable[int | None]], guard: IO[str]) -> None:
        """`wait` may be called at any time, by several tasks."""
        self.name, self.pid = name, pid
        self._wait, self._guard = wait, guard
        self._killed: list[int] = []
        """Numbers of the group's processes, as they were killed."""

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
        """Wait for so many seconds until the process ends by itself, then end it and everything that it started, and
        wait until all of that has given back its memory."""
        if not self._guard.closed:
            try:
                async with asyncio.timeout(grace_s):
                    await self._wait()
            except TimeoutError:
                log.info("ended the %s process, which had not ended by itself within %s s", self.name, grace_s)
        if not self._guard.closed:  # else its number may be another's by now, since the guard is gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._guard.close()
            every = [int(process.name) for process in os.scandir("/proc") if process.name.isdigit()]
            self._killed = _find_living(self.pid, every)
            await self._wait()
        await self._wait_for_killed()
        if self.folder is not None:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def _wait_for_killed(self) -> None:
        try:
            async with asyncio.timeout(_DYING_S):
                while left := _find_living(self.pid, self._killed):  # noqa: ASYNC110 - nobody tells of such an end
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            numbers = ", ".join(map(str, left))
            log.error("%s: processes %s have not ended %s s after they were killed", self.name, numbers, _DYING_S)


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


def _find_living(group: int, pids: Iterable[int]) -> list[int]:
    """Return which of the processes are of a group and hold memory: a zombie does only while threads of it are left."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it is gone
            if os.getpgid(pid) == group:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                state, num_threads = fields[0], int(fields[17])
                if state not in (b"Z", b"X") or num_threads > 1:
                    found.append(pid)
    return found
