"""Child processes and typed calls to them.

A call is a pickled message over a socket pair: (id, method, args) there, (id, outcome, value) back.
Children run in a session of their own, so that Ctrl-C reaches the server alone and the server can end
a child together with everything it started. A child ends itself when the server's end closes.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from backends.protocol import BackendFailed, InvalidInput

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
SHARING_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of children that compute on the CPU: OpenMP threads sleep while they wait. By default they spin,
for milliseconds of each small operation once other processes want the cores: a training step of 2 s took 14."""


class ChildDied(BackendFailed):
    """The process ended, or was ended, before it answered."""


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Child:
    """The server's end of one child process."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = name
        self._process = process
        self._writer = writer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self.died = asyncio.Event()
        """Set once the process no longer answers."""
        self._reading = asyncio.create_task(self._read(reader), name=f"replies of {name}")

    @classmethod
    async def start(cls, name: str, module: str, env: Mapping[str, str] | None = None) -> "Child":
        """Run `python -m module FD`; the module ends in `serve` or `serve_async`."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(env or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # the server's own output is for its user alone
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return cls(name, process, reader, writer)

    async def call(self, method: str, *args: Any) -> Any:
        """The method's value. Raises InvalidInput as the child did, BackendFailed for any other error there,
        ChildDied where no answer will come. Cancelling tells the child, which may then stop the work."""
        if self.died.is_set():
            raise ChildDied(f"the {self.name} process has ended")
        call_id = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._writer.write(_frame((call_id, method, args)))
            await self._writer.drain()
            return await answer
        except asyncio.CancelledError:
            if not self.died.is_set():
                self._writer.write(_frame((call_id, None, ())))
            raise
        except (ConnectionError, BrokenPipeError):
            raise ChildDied(f"the {self.name} process has ended") from None
        finally:
            self._calls.pop(call_id, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                call_id, outcome, value = pickle.loads(await reader.readexactly(length))
                call = self._calls.get(call_id)
                if call is None or call.done():
                    continue
                if outcome == "value":
                    call.set_result(value)
                else:
                    call.set_exception(InvalidInput(value) if outcome == "invalid" else BackendFailed(value))
        self.died.set()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ChildDied(f"the {self.name} process ended while it worked"))

    async def stop(self, grace_s: float = 10) -> None:
        """Close our end, which the child takes as its signal to end, then end its whole session."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            log.warning("the %s process did not end within %s s and is killed", self.name, grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.gather(self._reading, return_exceptions=True)


def serve(make: Callable[..., Any]) -> None:
    """A child's whole life, one call at a time: the first call, `start`, makes the object that has the
    methods of all further ones."""
    connection = _connection()
    target: Any = None
    while (message := _receive(connection)) is not None:
        call_id, method, args = message
        if method is None:
            continue  # a cancelled call: it has run by now
        try:
            if method == "start":
                target = make(*args)
                value = None
            else:
                value = getattr(target, method)(*args)
            reply = (call_id, "value", value)
        except Exception as error:
            reply = (call_id, *_failure(error))
        connection.sendall(_frame(reply))


async def serve_async(make: Callable[..., Awaitable[Any]]) -> None:
    """A child's whole life, calls at once: as `serve`, but methods are coroutines and run side by side."""
    reader, writer = await asyncio.open_connection(sock=_connection(), limit=1 << 20)
    target: Any = None
    running: dict[int, asyncio.Task[None]] = {}

    async def run(call_id: int, method: str, args: tuple[Any, ...]) -> None:
        nonlocal target
        reply: tuple[Any, ...]
        try:
            if method == "start":
                target = await make(*args)
                reply = (call_id, "value", None)
            else:
                reply = (call_id, "value", await getattr(target, method)(*args))
        except Exception as error:
            reply = (call_id, *_failure(error))
        finally:
            running.pop(call_id, None)
        writer.write(_frame(reply))
        await writer.drain()

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            call_id, method, args = pickle.loads(await reader.readexactly(length))
            if method is None:
                if task := running.get(call_id):
                    task.cancel()
            else:
                running[call_id] = asyncio.create_task(run(call_id, method, args))


def _connection() -> socket.socket:
    return socket.socket(fileno=int(sys.argv[1]))


def _receive(connection: socket.socket) -> Any:
    header = _read_exactly(connection, _LENGTH.size)
    return None if header is None else pickle.loads(_read_exactly(connection, _LENGTH.unpack(header)[0]) or b"")


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    """None where the server has closed its end."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if count == 0:
            return None
        at += count
    return bytes(buffer)


def _failure(error: Exception) -> tuple[str, str]:
    if isinstance(error, InvalidInput):
        return "invalid", str(error)
    traceback.print_exc()
    return "failed", f"{type(error).__name__}: {error}"
