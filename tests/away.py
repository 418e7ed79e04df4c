"""A PostgreSQL that goes away or falls silent and comes back, for the one who reaches it through here."""

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import URL, make_url

NAME = ".s.PGSQL.5432"


class Way:
    """Passes connections on from a Unix socket of its own."""

    def __init__(self, directory: Path, database: URL) -> None:
        self._socket = directory / NAME
        self._database = database
        self._open: set[asyncio.StreamWriter] = set()
        self._num_silences = 0
        self._is_silent = False
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = database.set(host=None, port=None, query={"host": str(directory)}).render_as_string(False)

    def open(self) -> None:
        """PostgreSQL is there."""
        self._do(self._listen())

    def close(self) -> None:
        """It is away, in the middle of whatever it did."""
        self._do(self._cut())

    def silence(self) -> None:
        """Silently drop everything sent in both directions, on open connections too."""
        self._num_silences += 1
        self._is_silent = True

    def speak(self) -> None:
        """Let new connections reach PostgreSQL."""
        self._is_silent = False

    def end(self) -> None:
        """Once nobody needs it any more."""
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._pass_on, self._socket)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0.05)  # the ends of connections are noticed

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_silent:
            self._open.add(writer)
            await reader.read()
            writer.close()
            return
        silences = self._num_silences

        def is_heard() -> bool:
            return silences == self._num_silences

        host, port = self._database.host or self._database.query.get("host"), self._database.port or 5432
        if str(host).startswith("/"):
            far_reader, far_writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            far_reader, far_writer = await asyncio.open_connection(str(host), port)
        self._open |= {writer, far_writer}
        await asyncio.gather(_copy(reader, far_writer, is_heard), _copy(far_reader, writer, is_heard))
        for one in (writer, far_writer):
            one.close()
        self._open -= {writer, far_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_heard: Callable[[], bool]) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            if is_heard():
                writer.write(data)
                await writer.drain()
    if is_heard():
        writer.close()


@contextlib.contextmanager
def way_to(database_url: str) -> Iterator[Way]:
    """Open at first. The name of a Unix socket must be short."""
    directory = Path(tempfile.mkdtemp(prefix="pg-"))
    way = Way(directory, make_url(database_url))
    way.open()
    try:
        yield way
    finally:
        way.end()
        shutil.rmtree(directory)
