"""uvicorn, changed to serve before its app is ready, to drain before it stops, and to leave signals to its caller."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tinker_server.observability.progress import Processes
from tinker_server.web.connections import Connections
from tinker_server.web.http import BoundedHttp
from tinker_server.web.starting import Starting

KEEP_ALIVE_S = 75
"""Longer than the SDK's pause between polls, so that its connections stay open."""
BACKLOG = 4096
"""Connections that may wait to be accepted."""
CLOSE_S = 2
"""Seconds for answers on their way when all work has ended."""


class Server(uvicorn.Server):
    """Serves an app; the caller runs the app's lifespan within `listening`."""

    def __init__(self, app: ASGIApp, processes: Processes) -> None:
        """`processes`: those that start with the app."""
        self._app = app
        self._drain: Callable[[], Awaitable[None]] | None = None
        connections = Connections()
        self._starting = Starting(app, connections.most_held, processes)
        super().__init__(
            uvicorn.Config(
                self._starting,
                http=functools.partial(BoundedHttp, connections=connections),  # type: ignore[arg-type]  # calls it
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.config.load()
        self._front = self.config.loaded_app
        assert isinstance(self._front, ProxyHeadersMiddleware)

    @contextlib.asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Accept connections within the block, and hold their requests until `open`. If the block ends before, they are
        refused."""
        self._serving = asyncio.create_task(self.serve(sockets=[listener]), name="serving")
        try:
            yield
        finally:
            self._starting.refuse()
            self.should_exit = True
            await self._serving

    def open(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Serve the app, which is ready, and drain at the end."""
        self._drain = drain
        self._starting.open()
        self._front.app = self._app  # a layer that has no more work would cost every request a call

    async def wait_closed(self) -> None:
        """Return once `should_exit` is set, all is drained and all connections are closed."""
        await self._serving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, drain, then close the open connections."""
        for server in self.servers:
            server.close()
        if self._drain is not None:
            await self._drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: `__main__` handles them."""
        yield
