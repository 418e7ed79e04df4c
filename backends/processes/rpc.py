"""Typed calls from the server to a child process, and the child's side of them.

A call is a message over a socket: (id, command) there, (id, outcome, value, when it worked) back, after parts of its
answer where it tells some. A command is an object
whose type says what to do and what the answer is; the child matches it by that type. A child ends itself when
the server's end closes. How a child is started and ended, `launcher` knows.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from backends.processes.messages import STREAM_LIMIT, Outbox, parts, read_message, receive
from backends.processes.spans import ANSWERED, UNANSWERED, ProcessSpan, tell
from backends.protocol import BackendFailed, InvalidInput, ModelLost, ProcessDied

log = logging.getLogger(__name__)
R = TypeVar("R")
Hearer = Callable[[Any], None]
"""Takes one part of an answer."""
MAX_ANSWER_BYTES = 512 << 20
"""A tenant decides how long the answer is; a longer one fails its call alone. Messages to a child are the server's."""
STOP_S = 1.0
"""For a child to end by itself when the server stops. What it computes is lost by then, and what it holds is kept."""


class ChildDied(ProcessDied):
    """The process ended, or was ended, before it answered."""


class ChildHangs(ChildDied):
    """The process lives, and does not answer within its time."""


class ChildBroke(BackendFailed):
    """An error in the process that nobody foresaw: what it holds may be in any state."""


class Command(Generic[R]):
    """What a child is asked to do; R is its answer. Subclasses are frozen dataclasses."""


_ERRORS: dict[str, type[Exception]] = {
    "invalid": InvalidInput,
    "lost": ModelLost,
    "broke": ChildBroke,
    "failed": BackendFailed,
}
"""How a child names what it raised; the first that fits."""


@dataclass(frozen=True)
class Process:
    """A started process, as far as its connection needs to know it."""

    pid: int
    end: Callable[[float], Awaitable[None]]
    """Waits so many seconds for the process to end by itself, then ends it and everything that it started."""


@dataclass(eq=False)
class _Call:
    """One that has no answer yet, or just got it."""

    hear: Hearer | None
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    outcome: str = UNANSWERED
    worked_ns: tuple[int, int] | None = None
    """When the child began and ended it, in Unix nanoseconds."""


class Child:
    """The server's end of one child process."""

    def __init__(self, name: str, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.process = process
        self._outbox = Outbox(writer, name)
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()
        self.died = asyncio.Event()
        """Set once the process no longer answers."""
        self._patient_until_s = 0.0
        """By the event loop's clock: what the child asked for."""
        self._reading = asyncio.create_task(self._read(reader), name=f"replies of {name}")

    async def call(self, command: Command[R], patience_s: float | None = None, hear: Hearer | None = None) -> R:
        """The command's answer. Raises InvalidInput, ModelLost and BackendFailed as the child did, ChildBroke for
        any other error there, ChildDied where no answer will come. Cancelling tells the child, which may then
        stop the work.

        With `patience_s`, ChildHangs is raised where the child has neither answered nor asked for more time
        (`KeepWaiting`) for so long, and for the time that it asked for. `hear` gets whatever the child tells before
        it answers, in order.
        """
        if self.died.is_set():
            raise ChildDied(f"the {self.name} process has ended")
        call_id, asked_ns = next(self._ids), time.time_ns()
        call = self._calls[call_id] = _Call(hear)
        answer: asyncio.Future[R] = call.answer
        try:
            self._outbox.send((call_id, command))
            if patience_s is not None:
                await self._wait(answer, patience_s)
            return await answer
        except asyncio.CancelledError:
            self._outbox.send((call_id, None))
            raise
        finally:
            self._calls.pop(call_id, None)
            began_ns, ended_ns = call.worked_ns or (asked_ns, time.time_ns())
            tell(ProcessSpan(self.name, type(command).__name__, began_ns, ended_ns, call.outcome))

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
            log.exception("an answer of the %s process cannot be read: it is taken for dead", self.name)
        finally:
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
            assert call.hear is not None, "only a call that has a hearer is told parts"
            call.hear(value)
            return
        call.outcome, call.worked_ns = outcome, worked_ns
        if outcome == ANSWERED:
            call.answer.set_result(value)
        else:
            call.answer.set_exception(_ERRORS[outcome](value))

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Close our end, which the child takes as its signal to end, and see that it has ended."""
        self._outbox.close()
        await self.process.end(grace_s)
        await asyncio.gather(self._reading, return_exceptions=True)


KeepWaiting = Callable[[float], None]
"""What a child calls before it works for longer: the number of seconds that the server should wait from now."""


def serve(make: Callable[[KeepWaiting], Callable[[Any, Hearer], Any]]) -> None:
    """A child's whole life, one command at a time: what `make` returns takes it and returns its answer, or a Future
    of it, which is answered when it is done, while the next command runs. What it calls with a part of its answer
    tells the server that part."""
    connection, turn = _connection(), threading.Lock()

    def send(*message: Any) -> None:
        data = b"".join(parts(message, MAX_ANSWER_BYTES))
        with turn, contextlib.suppress(ConnectionError):  # the server has closed its end: `receive` will say so
            connection.sendall(data)

    def answer(call_id: int, result: Callable[[], Any], began_ns: int) -> None:
        try:
            value = result()
            if isinstance(value, Future):
                value.add_done_callback(lambda done: answer(call_id, done.result, began_ns))
                return
            send(call_id, ANSWERED, value, (began_ns, time.time_ns()))
        except Exception as error:  # noqa: BLE001 - what goes wrong in a child is told to the server
            send(call_id, *_failure(error), (began_ns, time.time_ns()))

    handle = make(lambda seconds: send(None, "wait", seconds))
    while (message := receive(connection)) is not None:
        call_id, command = message
        if command is not None:  # else a cancelled call: it has run by now
            answer(call_id, partial(handle, command, partial(send, call_id, "part")), time.time_ns())


async def serve_async(handle: Callable[[Any, Hearer], Awaitable[Any]]) -> None:
    """A child's whole life, commands at once: as `serve`, but `handle` is a coroutine function, whose calls run
    side by side; what it calls with a part of its answer tells the server that part. Where the caller of one stops
    waiting, its coroutine is cancelled."""
    reader, writer = await asyncio.open_connection(sock=_connection(), limit=STREAM_LIMIT)
    outbox = Outbox(writer, "the server")
    running: dict[int, asyncio.Task[None]] = {}

    async def run(call_id: int, command: Any) -> None:
        began_ns = time.time_ns()
        try:
            answer = await handle(command, lambda part: outbox.send((call_id, "part", part), MAX_ANSWER_BYTES))
            outbox.send((call_id, ANSWERED, answer, (began_ns, time.time_ns())), MAX_ANSWER_BYTES)
        except Exception as error:  # noqa: BLE001 - what goes wrong in a child is told to the server
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
