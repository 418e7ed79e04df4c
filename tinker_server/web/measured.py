"""Counts every answer, by the route that gave it."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_server.observability.metrics import Metrics

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NO_ROUTE = "none"
"""Of requests that the gate refused, or that no route is for."""
OTHER = "other"


class Measured:
    """Outside of all else, so that refusals count too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        metrics: Metrics = scope["app"].state.services.metrics
        began = time.monotonic()

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else OTHER
                metrics.answered(method, _route(scope), message["status"], time.monotonic() - began)
            await send(message)

        await self.app(scope, receive, told)


def _route(scope: Scope) -> str:
    """The path with names in the place of ids: of these there are as many as the server has routes."""
    path: str = getattr(scope.get("route"), "path", NO_ROUTE)
    return path
