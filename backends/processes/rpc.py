"""Typed calls from the server to a child process, and the child's side of them.

A call is a message over a socket: (id, command) there, and back (id, outcome, value, times of work), after parts of the
answer if there are any. A command is an object whose type says what to do and what the answer is; the child matches it
by that type. A child ends itself when the server's end closes. `launcher` starts and ends children.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Never, TypeVar

from tinker_server.backends.processes.messages import STREAM_LIMIT, Outbox, parts, read_message, receive
from tinker_server.backends.processes.spans import ANSWERED, UNANSWERED, ProcessSpan, emit
from tinker_server.backends.protocol import BackendFailed, InvalidInput, ModelLost, ProcessDied

log = logging.getLogger(__name__)
R = TypeVar("R")
C = TypeVar("C")
OnPart = Callable[[Any], None]
"""Takes a part of an answer, ahead of the answer itself."""
MAX_ANSWER_BYTES = 512 << 20
"""A user decides how long an answer is; a longer answer fails its call alone. Messages to a child are the server's."""
STOP_S = 1.0
"""Time for a child to end by itself when the server stops. Its computation is lost, and what it holds is kept."""


class ChildDied(ProcessDied):
    """The process ended, or was ended, before it answered."""


class ChildHangs(ChildDied):
    """The process lives, but has not answered in time."""


class ChildBroke(BackendFailed):
    """An unforeseen error in the process: what it holds may be in any state."""


class Command(Generic[R]):
    """A request to a child; R is its answer. Subclasses are frozen dataclasses."""


class WeightsAbsent(BackendFailed):
    """An engine on another machine does not have the weights: they must be sent to it first."""


_ERRORS: dict[str, type[Exception]] = {
    "absent": WeightsAbsent,
    "invalid": InvalidInput,
    "lost": ModelLost,
    "broke": ChildBroke,
    "failed": BackendFailed,
}
"""Kinds of errors by the names that a child sends; the first that fits counts."""


@dataclass(frozen=True)
class Process:
    """A started process, as far as its connection knows it."""

    pid: int
    """Its number on the machine that it runs on: for the operator to see."""
    end: Callable[[float], Awaitable[None]]
    """Waits up to so many seconds for the process to end by itself, then ends it and everything that it started."""


@dataclass(eq=False)
class _Call:
    """A call that has no answer yet, or just got it."""

    on_part: OnPart | None
    answer: asyncio.Future[Any]
    outcome: str = UNANSWERED
    worked_ns: tuple[int, int] | None = None
    """Times at which the child began and ended it, in Unix nanoseconds."""


class Child:
    """The server's end of a child process."""

    def __init__(self, name: str, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.process = process
        self._outbox = Outbox(writer, name)
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()
        self.died = asyncio.Event()
        """Set once the process no longer answers."""
        self.died_s = float("inf")
        """Time of that, by the monotonic clock."""
        self._patient_until_s = 0.0
        """By the event loop's clock: the time that the child asked for."""
        self._reading = asyncio.create_task(self._read(reader), name=f"replies of {name}")

    async def call(
        self, command: Command[R], patience_s: float | None = None, on_part: OnPart | None = None, owner: str = ""
    ) -> R:
        """Return the command's answer. Raises InvalidInput, ModelLost and BackendFailed as the child did, ChildBroke
        for any other error there, ChildDied if no answer will come. Cancelling notifies the child, which may then stop
        the work.

        With `patience_s`, ChildHangs is raised if the child has neither answered nor asked for more time
        (`KeepWaiting`) for so long, plus the time that it asked for. `on_part` gets the parts of the answer, in order.
        Commands of an owner are sent in order, and owners' in turn.
        """
        if self.died.is_set():
            raise ChildDied(f"the {self.name} process has ended")
        call_id, asked_ns = next(self._ids), time.time_ns()
        call = self._calls[call_id] = _Call(on_part, asyncio.get_running_loop().create_future())
        answer: asyncio.Future[R] = call.answer
        try:
            self._outbox.send((call_id, command), owner=owner)
            if patience_s is not None:
                await self._wait(answer, patience_s)
            return await answer
        except asyncio.CancelledError:
            self._outbox.send((call_id, None), owner=owner)
            raise
        finally:
            self._calls.pop(call_id, None)
            began_ns, ended_ns = call.worked_ns or (asked_ns, time.time_ns())
            emit(ProcessSpan(self.name, type(command).__name__, began_ns, ended_ns, call.outcome))

    async def _wait(self, answer: asyncio.Future[R], patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._patient_until_s = loop.time()
        while not answer.done():
            left_s = self._patient_until_s + patience_s - loop.time()
            if left_s <= 0:
                raise ChildHangs(f"the {self.name} process has not answered in time")
            await asyncio.wait({answer}, timeout=left_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._settle(*await read_message(reader, MAX_ANSWER_BYTES))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("unreadable answer from %s: treating the process as dead", self.name)
        finally:
            self.died_s = time.monotonic()
            self.died.set()
            self._outbox.close()
            for call in self._calls.values():
                if not call.answer.done():
                    call.answer.set_exception(ChildDied(f"the {self.name} process ended while it worked"))

    def _settle(self, call_id: int | None, outcome: str, value: Any, worked_ns: tuple[int, int] | None = None) -> None:
        if call_id is None:  # it asks for so many seconds
            self._patient_until_s = asyncio.get_running_loop().time() + value
            return
        call = self._calls.get(call_id)
        if call is None or call.answer.done():
            return
        if outcome == "part":
            assert call.on_part is not None, "only a call that takes parts gets some"
            call.on_part(value)
            return
        call.outcome, call.worked_ns = outcome, worked_ns
        if outcome == ANSWERED:
            call.answer.set_result(value)
        else:
            call.answer.set_exception(_ERRORS[outcome](value))

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Close our end, which is the child's signal to end, and wait until it has ended."""
        self._outbox.close()
        await self.process.end(grace_s)
        await asyncio.gather(self._reading, return_exceptions=True)


KeepWaiting = Callable[[float], None]
"""Called in a child before long work, with the number of seconds that the server should wait from now."""


def serve(make: Callable[[KeepWaiting], Callable[[C, OnPart], object]]) -> None:
    """Run a child's whole life, one command at a time. The function that `make` returns takes a command, and a callback
    for parts of the answer. It returns the answer, or a Future of it: the next command then runs meanwhile. The process
    ends with the server's end of the connection, whatever it computes then."""
    end_with_server()
    connection, lock = _connection(), threading.Lock()
    connection.setblocking(True)  # one from another machine was an event loop's before

    def send(*message: object) -> None:
        data = b"".join(parts(message, MAX_ANSWER_BYTES))
        with lock, contextlib.suppress(ConnectionError):  # the server has closed its end: `receive` will notice
            connection.sendall(data)

    def answer(call_id: int, result: Callable[[], object], began_ns: int) -> None:
        try:
            value = result()
            if isinstance(value, Future):
                value.add_done_callback(lambda done: answer(call_id, done.result, began_ns))
                return
            send(call_id, ANSWERED, value, (began_ns, time.time_ns()))
        except Exception as error:  # noqa: BLE001 - errors of a child are sent to the server
            send(call_id, *_failure(error), (began_ns, time.time_ns()))

    handle = make(lambda seconds: send(None, "wait", seconds))
    while (message := receive(connection)) is not None:
        call_id, command = message
        if command is not None:  # else a cancelled call: it has run by now
            answer(call_id, partial(handle, command, partial(send, call_id, "part")), time.time_ns())
    exit_now()


def end_with_server() -> None:
    """From now on, end this process at once when the server closes its end of the connection, also amid a command.
    What the process holds is lost with it, so it need give nothing back."""

    def wait() -> None:
        closed = select.poll()
        closed.register(int(sys.argv[1]), select.POLLRDHUP)
        closed.poll()
        exit_now()

    threading.Thread(target=wait, name="end of the server", daemon=True).start()


def exit_now() -> Never:
    """End this process without the interpreter's and the libraries' own ends, which take CUDA and vLLM seconds."""
    sys.stderr.flush()
    os._exit(0)


async def serve_async(handle: Callable[[C, OnPart], Awaitable[object]]) -> None:
    """Run a child's whole life, commands side by side: as `serve`, but `handle` is a coroutine function. When the
    caller of a command stops waiting, its coroutine is cancelled."""
    reader, writer = await asyncio.open_connection(sock=_connection(), limit=STREAM_LIMIT)
    outbox = Outbox(writer, "the server")
    running: dict[int, asyncio.Task[None]] = {}

    async def run(call_id: int, command: C) -> None:
        began_ns = time.time_ns()
        try:
            answer = await handle(command, lambda part: outbox.send((call_id, "part", part), MAX_ANSWER_BYTES))
            outbox.send((call_id, ANSWERED, answer, (began_ns, time.time_ns())), MAX_ANSWER_BYTES)
        except Exception as error:  # noqa: BLE001 - errors of a child are sent to the server
            outbox.send((call_id, *_failure(error), (began_ns, time.time_ns())))
        finally:
            running.pop(call_id, None)

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            call_id, command = await read_message(reader)
            if command is not None:
                running[call_id] = asyncio.create_task(run(call_id, command))
            elif task := running.get(call_id):
                task.cancel()
    outbox.close()


def _connection() -> socket.socket:
    return socket.socket(fileno=int(sys.argv[1]))


def _failure(error: Exception) -> tuple[str, str]:
    for outcome, kind in _ERRORS.items():
        if isinstance(error, kind):
            return outcome, str(error)
    traceback.print_exc()
    return "broke", f"{type(error).__name__}: {error}"
