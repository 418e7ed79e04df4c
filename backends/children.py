"""Child processes and typed calls to them.

A call is a pickled message over a socket pair: (id, command) there, (id, outcome, value) back. A command is
an object whose type says what to do and what the answer is; the child matches it by that type.
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
from typing import Any, Generic, TypeVar

from backends.protocol import BackendFailed, InvalidInput

log = logging.getLogger(__name__)
R = TypeVar("R")
_LENGTH = struct.Struct("<Q")
_LARGE_BYTES = 64 << 10
"""A buffer (`pickle.PickleBuffer`, a numpy array) of this size is sent beside the pickled message, not in it."""
_PIECE_BYTES = 1 << 20
"""What is handed to a socket at once, so that the event loop stays free."""
SHARING_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of children that compute on the CPU: OpenMP threads sleep while they wait. By default they spin,
for milliseconds of each small operation once other processes want the cores: a training step of 2 s took 14."""


class ChildDied(BackendFailed):
    """The process ended, or was ended, before it answered."""


class Command(Generic[R]):
    """What a child is asked to do; R is its answer. Subclasses are frozen dataclasses."""


def _parts(message: Any) -> list[bytes | memoryview]:
    """A message as it is sent: lengths of all parts, the pickled message, its large buffers."""
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE_BYTES:
            buffers.append(raw)
        return raw.nbytes < _LARGE_BYTES

    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep_inside)
    lengths = [len(data), *(buffer.nbytes for buffer in buffers)]
    header = b"".join(map(_LENGTH.pack, (len(lengths), *lengths)))
    return [header + data, *buffers]


class _Outbox:
    """One end's writing half: messages go out whole and in order, whatever becomes of who sent them."""

    def __init__(self, writer: asyncio.StreamWriter, name: str) -> None:
        self._writer = writer
        self._queue: asyncio.Queue[list[bytes | memoryview]] = asyncio.Queue()
        self._writing = asyncio.create_task(self._write(), name=f"messages to {name}")

    def send(self, message: Any) -> None:
        """Raises whatever pickling the message raises; a closed connection is for the reading half to notice."""
        self._queue.put_nowait(_parts(message))

    def close(self) -> None:
        """Send nothing more."""
        self._writing.cancel()
        self._writer.close()

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                for part in await self._queue.get():
                    for start in range(0, len(part), _PIECE_BYTES):
                        self._writer.write(part[start : start + _PIECE_BYTES])
                        await self._writer.drain()


async def _read_message(reader: asyncio.StreamReader) -> Any:
    """Raises IncompleteReadError or ConnectionError where the other end has closed."""
    (count,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    lengths = [_LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0] for _ in range(count)]
    data, *buffers = [await reader.readexactly(length) for length in lengths]
    return pickle.loads(data, buffers=buffers)


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
        self._outbox = _Outbox(writer, name)
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

    async def call(self, command: Command[R]) -> R:
        """The command's answer. Raises InvalidInput as the child did, BackendFailed for any other error there,
        ChildDied where no answer will come. Cancelling tells the child, which may then stop the work."""
        if self.died.is_set():
            raise ChildDied(f"the {self.name} process has ended")
        call_id = next(self._ids)
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._outbox.send((call_id, command))
            return await answer
        except asyncio.CancelledError:
            self._outbox.send((call_id, None))
            raise
        finally:
            self._calls.pop(call_id, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._settle(*await _read_message(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("an answer of the %s process cannot be read: it is taken for dead", self.name)
        finally:
            self.died.set()
            self._outbox.close()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(ChildDied(f"the {self.name} process ended while it worked"))

    def _settle(self, call_id: int, outcome: str, value: Any) -> None:
        call = self._calls.get(call_id)
        if call is None or call.done():
            return
        if outcome == "value":
            call.set_result(value)
        else:
            call.set_exception(InvalidInput(value) if outcome == "invalid" else BackendFailed(value))

    async def stop(self, grace_s: float = 10) -> None:
        """Close our end, which the child takes as its signal to end, then end its whole session."""
        self._outbox.close()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            log.warning("the %s process did not end within %s s and is killed", self.name, grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.gather(self._reading, return_exceptions=True)


def serve(handle: Callable[[Any], Any]) -> None:
    """A child's whole life, one command at a time: `handle` takes it and returns its answer."""
    connection = _connection()
    while (message := _receive(connection)) is not None:
        call_id, command = message
        if command is None:
            continue  # a cancelled call: it has run by now
        try:
            reply = b"".join(_parts((call_id, "value", handle(command))))
        except Exception as error:
            reply = b"".join(_parts((call_id, *_failure(error))))
        try:
            connection.sendall(reply)
        except ConnectionError:  # the server has closed its end
            return


async def serve_async(handle: Callable[[Any], Awaitable[Any]]) -> None:
    """A child's whole life, commands at once: as `serve`, but `handle` is a coroutine function, whose calls run
    side by side. Where the caller of one stops waiting, its coroutine is cancelled."""
    reader, writer = await asyncio.open_connection(sock=_connection(), limit=1 << 20)
    outbox = _Outbox(writer, "the server")
    running: dict[int, asyncio.Task[None]] = {}

    async def run(call_id: int, command: Any) -> None:
        try:
            outbox.send((call_id, "value", await handle(command)))
        except Exception as error:
            outbox.send((call_id, *_failure(error)))
        finally:
            running.pop(call_id, None)

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            call_id, command = await _read_message(reader)
            if command is not None:
                running[call_id] = asyncio.create_task(run(call_id, command))
            elif task := running.get(call_id):
                task.cancel()
    outbox.close()


def _connection() -> socket.socket:
    return socket.socket(fileno=int(sys.argv[1]))


def _receive(connection: socket.socket) -> Any:
    """The next message; None where the server has closed its end."""
    try:
        (count,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
        lengths = [_LENGTH.unpack(_read_exactly(connection, _LENGTH.size))[0] for _ in range(count)]
        data, *buffers = [_read_exactly(connection, length) for length in lengths]
    except (EOFError, ConnectionError):
        return None
    return pickle.loads(data, buffers=buffers)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError where the server has closed its end."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if count == 0:
            raise EOFError
        at += count
    return bytes(buffer)


def _failure(error: Exception) -> tuple[str, str]:
    if isinstance(error, InvalidInput):
        return "invalid", str(error)
    traceback.print_exc()
    return "failed", f"{type(error).__name__}: {error}"
