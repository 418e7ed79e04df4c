"""uvicorn, changed to drain before it stops, and to leave signals to its caller."""

import contextlib
import functools
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from tinker_server.web.connections import Connections
from tinker_server.web.http import BoundedHttp

KEEP_ALIVE_S = 75
"""Longer than the SDK's pause between polls, so that its connections stay open."""
BACKLOG = 4096
"""Connections that may wait to be accepted."""
CLOSE_S = 2
"""Seconds for answers on their way when all work has ended."""


class Server(uvicorn.Server):
    """Serves an app; the caller runs the app's lifespan."""

    def __init__(self, app: FastAPI, drain: Callable[[], Awaitable[None]], started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(BoundedHttp, connections=Connections()),  # type: ignore[arg-type]  # calls it
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._drain = drain
        self._on_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `started`."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, drain, then close the open ones."""
        for server in self.servers:
            server.close()
        await self._drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: `__main__` handles them."""
        yield
