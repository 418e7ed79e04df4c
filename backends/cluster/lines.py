"""Lines that the processes of a machine write: they are kept in a file there, and sent to the server's log.

Both are bounded. Beyond the bound the oldest lines are dropped, and the server's log states how many bytes.
"""

import asyncio
import contextlib
import logging
import logging.handlers
import os
from collections import deque
from pathlib import Path
from typing import IO

from tinker_server.backends.cluster.handshake import Connection, connect
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
LOG = "engines.log"
FILE_BYTES = 4 << 20
"""Size at which a new file is begun; the file before it stays."""
BACKLOG_BYTES = 64 << 10
"""The most that waits to be sent."""
LINE_BYTES = 4000
"""A longer line is cut into several."""
_BYTES_PER_S = 16 << 10
_RETRY_S = 2.0


class Backlog:
    """The last lines that were not sent yet."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._size_bytes = self._left_out_bytes = 0
        self._filled = asyncio.Event()

    def put(self, line: bytes) -> None:
        """Add a line; the oldest leave where there are too many."""
        self._lines.append(line)
        self._size_bytes += len(line)
        while self._size_bytes > BACKLOG_BYTES:
            self._left_out_bytes += len(oldest := self._lines.popleft())
            self._size_bytes -= len(oldest)
        self._filled.set()

    async def get(self) -> str:
        """Return the next line, or the number of bytes that were left out before it; wait for a line."""
        await self._filled.wait()
        if (num := self._left_out_bytes) > 0:
            self._left_out_bytes = 0
            return f"({num} bytes are left out)"
        line = self._lines.popleft()
        self._size_bytes -= len(line)
        if not self._lines:
            self._filled.clear()
        return line.decode(errors="replace")


class _Kept(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line, as on a full disk: the standard error, where logging would say so, is the pipe that is read
        here."""


class Lines:
    """Takes what is written into `file`."""

    def __init__(self, directory: Path, name: str, server: str, token: str) -> None:
        """`name` is the machine's."""
        reading, writing = os.pipe()
        self.file: IO[str] = os.fdopen(writing, "w", buffering=1)
        self._read_end = os.fdopen(reading, "rb", buffering=0)
        self._kept = _Kept(directory / LOG, maxBytes=FILE_BYTES, backupCount=1)
        self._name, self._server, self._token = name, server, token

    async def forward(self) -> None:
        """Keep and send lines until all have closed the file."""
        reader, backlog = asyncio.StreamReader(), Backlog()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._read_end)
        sending = asyncio.create_task(self._send(backlog))
        rest = b""
        while piece := await reader.read(LINE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._kept.handle(logging.makeLogRecord({"msg": line.decode(errors="replace")}))
                backlog.put(line)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        with contextlib.suppress(OSError):  # as on a full disk
            self._kept.close()

    async def _send(self, backlog: Backlog) -> None:
        while True:
            line = await backlog.get()
            with contextlib.suppress(BackendFailed, OSError):
                connection = await connect(self._server, self._token, ask="lines", name=self._name)
                try:
                    while True:
                        connection.send(line=line)
                        await connection.writer.drain()
                        await asyncio.sleep(len(line) / _BYTES_PER_S)
                        line = await backlog.get()
                finally:
                    connection.close()
            await asyncio.sleep(_RETRY_S)


async def show(connection: Connection) -> None:
    """Log the lines that a machine sends, with its name."""
    connection.send(welcome=True)
    while (said := await connection.receive()) is not None:
        log.warning("%s: %s", connection.said.get("name"), said.get("line"))
