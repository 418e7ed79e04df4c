"""Messages between the server and its children, over a socket: any Python object, pickled.

A message is sent as the number of its parts, their lengths, the pickled object and its large buffers.
"""

import asyncio
import contextlib
import pickle
import socket
import struct
from collections import deque
from typing import Any

from tinker_server.backends.protocol import InvalidInput

_LENGTH = struct.Struct("<Q")
_LARGE_BYTES = 64 << 10
"""Buffers (`pickle.PickleBuffer`, numpy arrays) of at least this size are sent beside the pickled message, not in
it."""
_PIECE_BYTES = 1 << 20
"""Bytes that are handed to a socket at once, so that the event loop stays free."""
STREAM_LIMIT = 1 << 20
"""Limit of the StreamReader that `read_message` reads from."""


def parts(message: object, max_bytes: int | None = None) -> list[bytes | memoryview]:
    """Return a message in the form in which it is sent: lengths of all parts, the pickled message, its large buffers.

    Raises InvalidInput for a message of more than `max_bytes`.
    """
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE_BYTES:
            buffers.append(raw)
        return raw.nbytes < _LARGE_BYTES

    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep_inside)
    lengths = [len(data), *(buffer.nbytes for buffer in buffers)]
    if max_bytes is not None and sum(lengths) > max_bytes:
        raise InvalidInput(
            f"the answer has {sum(lengths)} bytes; at most {max_bytes} can be given: ask for less at once"
        )
    header = b"".join(map(_LENGTH.pack, (len(lengths), *lengths)))
    return [header + data, *buffers]


class Outbox:
    """Writing half of a connection: messages go out whole, those of an owner in order and owners in turn, even if their
    sender is cancelled."""

    def __init__(self, writer: asyncio.StreamWriter, name: str) -> None:
        self._writer = writer
        self._waiting: dict[str, deque[list[bytes | memoryview]]] = {}
        """By owner, the owner who is next first."""
        self._has_messages = asyncio.Event()
        self._writing = asyncio.create_task(self._write(), name=f"messages to {name}")

    def send(self, message: object, max_bytes: int | None = None, owner: str = "") -> None:
        """Queue a message. Raises as `parts` and pickling do; a closed connection is noticed by the reading half."""
        self._waiting.setdefault(owner, deque()).append(parts(message, max_bytes))
        self._has_messages.set()

    def close(self) -> None:
        """Stop sending and close the connection."""
        self._writing.cancel()
        self._writer.close()

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await self._has_messages.wait()
                owner = next(iter(self._waiting))
                messages = self._waiting.pop(owner)
                message = messages.popleft()
                if messages:
                    self._waiting[owner] = messages  # behind all others
                if not self._waiting:
                    self._has_messages.clear()
                for part in message:
                    for start in range(0, len(part), _PIECE_BYTES):
                        self._writer.write(part[start : start + _PIECE_BYTES])
                        await self._writer.drain()


async def read_message(reader: asyncio.StreamReader, max_bytes: int | None = None) -> Any:
    """Read the next message. Raises IncompleteReadError or ConnectionError if the other end has closed, and ValueError
    for a message of more than `max_bytes`, before it is read."""
    (count,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    lengths = [_LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0] for _ in range(count)]
    if max_bytes is not None and sum(lengths) > max_bytes:
        raise ValueError(f"a message of {sum(lengths)} bytes")
    data, *buffers = [await reader.readexactly(length) for length in lengths]
    return pickle.loads(data, buffers=buffers)


def receive(connection: socket.socket) -> Any:
    """Return the next message; None if the server has closed its end."""
    try:
        (count,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
        lengths = [_LENGTH.unpack(_read_exactly(connection, _LENGTH.size))[0] for _ in range(count)]
        data, *buffers = [_read_exactly(connection, length) for length in lengths]
    except (EOFError, ConnectionError):
        return None
    return pickle.loads(data, buffers=buffers)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError if the server has closed its end."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if count == 0:
            raise EOFError
        at += count
    return bytes(buffer)
