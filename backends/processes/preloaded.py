"""Start processes as forks of processes that have imported what they need (`forking.py`), which takes 10 to 26 s.

There is such a process for each module and each set of variables that libraries may read while they are imported, from
its first use to the end of this process. If it dies, the next start makes it again; its forks live on. A server notes
which it needs, and begins them at once at its next start, beside its own imports.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import Context
from pathlib import Path

from tinker_server.backends.files import write_private
from tinker_server.backends.processes import guarded
from tinker_server.backends.processes.forking import Request
from tinker_server.backends.processes.guarded import Guarded, make_guard_pipe
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
LATE: tuple[str, ...] = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "VLLM_RPC_BASE_PATH",
)
"""Variables that no library reads while it is imported: each process has its own. All others, CUDA_VISIBLE_DEVICES
among them, are those of the process that imports."""
_NOTED = "imports.json"
_NUMBER_BYTES = 16
_IMPORT_S = 600
"""Longest time that imports may take: more than a minute on a busy machine."""


class _Importer:
    """A process that has imported a module, and is forked."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._module, self._began_s = modules[0], time.monotonic()
        self.has_answered = False
        # Requests are taken in order.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tinker_server.backends.processes.forking", *modules]
        with theirs:
            self._process = guarded.Server(command, env, theirs.fileno())

    def ask(self, request: Request, fds: Sequence[int]) -> None:
        """Ask for a fork. Raises ConnectionError if the process has ended."""
        socket.send_fds(self._requests, [request.encode()], fds)

    def note_answer(self) -> None:
        """Log how long the imports took, once."""
        if not self.has_answered:
            self.has_answered = True
            log.info("imported the libraries of %s in %.0f s", self._module, time.monotonic() - self._began_s)

    def end(self) -> None:
        """End the process. Its forks live on."""
        self._requests.close()
        self._process.end()


_Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]
_importers: dict[_Key, _Importer] = {}


def begin_noted(directory: Path) -> None:
    """Begin the imports that `note` has written in the server's scratch directory."""
    with contextlib.suppress(OSError, ValueError):
        for modules, own in json.loads((directory / _NOTED).read_bytes()):
            env = _without_late(os.environ) | own
            key = tuple(modules), frozenset(env.items())
            if key not in _importers and can_fork():
                _importers[key] = _Importer(modules, env)


def note(directory: Path) -> None:
    """Write which imports are in use, and end those that nobody has used."""
    for key in [key for key, importer in _importers.items() if not importer.has_answered]:
        _importers.pop(key).end()
    found = [(modules, dict(env - os.environ.items())) for modules, env in _importers]
    with contextlib.suppress(OSError):  # the next start takes some seconds longer
        write_private(directory / _NOTED, json.dumps(found).encode(), durable=False)


@atexit.register
def _end_all() -> None:
    while _importers:
        _importers.popitem()[1].end()


def can_fork() -> bool:
    """Return whether the end of a process that is no child can be waited for: since Linux 5.3, and not in every
    sandbox."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


async def fork(
    name: str, modules: tuple[str, ...], env: Mapping[str, str], connection: int, fds: Mapping[str, int]
) -> Guarded:
    """Run `main` of the first of the modules, which are all imported, with exactly these variables. It finds the number
    of `connection` in its arguments, and those of `fds` in the variables that are their keys. Raises BackendFailed if
    the imports end."""
    own, imported = {variable: env[variable] for variable in LATE if variable in env}, _without_late(env)
    key = modules, frozenset(imported.items())
    request = Request(modules[0], own, list(fds))
    guarding, guard = make_guard_pipe()
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as unless_started, ours:
        unless_started.enter_context(guard)
        with theirs, os.fdopen(guarding):
            sent = [theirs.fileno(), guarding, sys.stderr.fileno(), connection, *fds.values()]
            importer = _ask(key, imported, request, sent)
        data, received = b"", list[int]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IMPORT_S):
                await _wait_until_readable(ours.fileno())
            data, received, *_ = socket.recv_fds(ours, _NUMBER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if data:
            unless_started.pop_all()
    if data:
        importer.note_answer()
        [ended] = received
        return Guarded(name, int(data), _End(ended).wait, guard)
    if _importers.get(key) is importer:
        del _importers[key]
    importer.end()
    if importer.has_answered:  # what ended it since then was not the imports
        return await fork(name, modules, env, connection, fds)
    raise BackendFailed(f"the process that imports {modules[0]} has ended, or hangs: there is no {name}")


def _ask(
    key: _Key,
    env: Mapping[str, str],
    request: Request,
    fds: Sequence[int],
) -> _Importer:
    """Ask the process that has imported this, which is started if there is none, or it has ended."""
    if (importer := _importers.get(key)) is not None:
        try:
            importer.ask(request, fds)
        except ConnectionError:
            _importers.pop(key).end()
        else:
            return importer
    importer = _importers[key] = _Importer(key[0], env)
    importer.ask(request, fds)
    return importer


def _without_late(env: Mapping[str, str]) -> dict[str, str]:
    return {variable: value for variable, value in env.items() if variable not in LATE}


class _End:
    """The end of a process that is no child of this process."""

    def __init__(self, descriptor: int) -> None:
        self._waiting = asyncio.create_task(
            _wait_until_readable(descriptor), name="end of a process", context=Context()
        )
        self._waiting.add_done_callback(lambda _: os.close(descriptor))

    async def wait(self) -> None:
        """Wait for it; only its parent learns the exit code."""
        await asyncio.shield(self._waiting)


async def _wait_until_readable(descriptor: int) -> None:
    """Wait until a descriptor can be read, by no other task."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
