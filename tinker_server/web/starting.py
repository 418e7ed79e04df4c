"""The outermost ASGI layer while the services start: it tells probes so, and holds all other requests until they are
ready.

Every client sends a refused request again, for minutes: so a request is refused only for lack of room.
"""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tinker_server.errors import ShuttingDown, StillStarting, TinkerServerError
from tinker_server.observability.progress import Processes
from tinker_server.release import release
from tinker_server.web.connections import Accounts, account_of
from tinker_server.web.handlers import CLIENT_GONE, answer
from tinker_server.web.http import CONNECTION_LOST

SHOW_VERSION = "/version"
PROBES = ("/api/v1/healthz", "/health", SHOW_VERSION)
"""Paths that are answered at once, until `routes/health.py` answers them."""
RETRY_AFTER = {"Retry-After": "10"}
"""A start takes longer than most conditions that pass."""


class Starting:
    """Holds requests until `open` or `refuse` is called.

    Held requests are counted by address. Beyond `most_held`, the address with the most loses the request that was held
    for longest, as it does with connections.
    """

    def __init__(self, app: ASGIApp, most_held: int, processes: Processes) -> None:
        """`processes`: those that start."""
        self.app = app
        self._most_held = most_held
        self._processes = processes
        self._held = Accounts()
        loop = asyncio.get_running_loop()
        self._time, self._began = loop.time, loop.time()
        self._decision: asyncio.Future[TinkerServerError | None] = loop.create_future()

    def open(self) -> None:
        """Serve the held requests, and all later requests."""
        self._decision.set_result(None)

    def refuse(self) -> None:
        """Refuse the held requests, and all later requests, since the server ends. Does nothing after `open`."""
        if not self._decision.done():
            self._decision.set_result(ShuttingDown("the server ends before it was ready; its log has the reason"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        is_probe = path in PROBES and scope["method"] in ("GET", "HEAD")
        if is_probe and not self._decision.done():
            await self._answer_probe(path)(scope, receive, send)
            return
        lost: asyncio.Future[None] = scope["state"][CONNECTION_LOST]
        refusal = await self._decide(account_of(scope["client"][0] if scope["client"] else ""), lost)
        if lost.done():
            await answer(path, CLIENT_GONE, ClientDisconnect(), "the client hung up")(scope, receive, send)
        elif refusal is None:
            await self.app(scope, receive, send)
        else:
            await answer(path, refusal.status, refusal, str(refusal), RETRY_AFTER)(scope, receive, send)

    async def _decide(self, account: str, lost: asyncio.Future[None]) -> TinkerServerError | None:
        """Hold a request until all are decided, its place is needed, or its connection is lost. Return its refusal."""
        place = _Place()
        ends: set[asyncio.Future[Any]] = {self._decision, place.needed, lost}
        self._held.add(account, place)
        if self._held.num > self._most_held:
            self._held.end_one()
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._held.remove(account, place)
        if self._decision.done():
            return self._decision.result()
        return StillStarting(f"the server is starting, and {self._most_held} other requests wait until it is ready")

    def _answer_probe(self, path: str) -> JSONResponse:
        """Make the answer: the version, or that the server is alive but not ready, and what it does."""
        if path == SHOW_VERSION:
            return JSONResponse(release()._asdict())
        error = StillStarting(f"the server has been starting for {self._time() - self._began:.0f} s")
        # Names of models are for owners alone.
        loading = [
            {"doing": now.doing, "done_bytes": now.done_bytes, "total_bytes": now.total_bytes}
            for _, now, _ in self._processes.rows()
        ]
        body = {"detail": str(error), "error": type(error).__name__, "loading": loading}
        return JSONResponse(body, error.status, RETRY_AFTER)


class _Place:
    """The place of a held request, as a Connection of Accounts."""

    def __init__(self) -> None:
        self.needed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Give the place to a newer request."""
        self.needed.set_result(None)
