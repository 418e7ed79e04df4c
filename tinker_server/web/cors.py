"""Lets scripts of web pages that the operator names call the chat endpoints (CORS).

A browser asks before such a call, without the key. That question is answered here, outside the gate.
"""

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_server.web import vendors

VALID_S = 600
"""Seconds for which a browser need not ask again."""


class Cors:
    """Adds the headers for the allowed origins. No cookie is allowed: such a page sends an API key."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """`origins`: such as https://chat.example; `*` stands for all."""
        self.app = app
        self.origins = {origin.rstrip("/").lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or vendors.vendor_of(scope["path"]) is None:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or not {origin.lower(), "*"} & self.origins:
            await self.app(scope, receive, send)
            return
        allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowed)
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            answer = Response(status_code=204, headers=allowed)
            answer.headers["Access-Control-Allow-Methods"] = "GET, POST"
            answer.headers["Access-Control-Allow-Headers"] = headers.get("access-control-request-headers", "")
            answer.headers["Access-Control-Max-Age"] = str(VALID_S)
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send_marked)
