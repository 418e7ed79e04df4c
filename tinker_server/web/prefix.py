"""The path prefix that a proxy removes, and sends as `X-Forwarded-Prefix`. Addresses that a client gets need it."""

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PREFIX = re.compile(r"(?:/[\w.-]+)*")
BY_ROUTER = 307
"""Status of the router's redirects, to the path with or without a slash at its end. No handler answers it."""


def prefix_of(headers: Headers) -> str:
    """Return the prefix, without a slash at its end; empty if there is none, or none that could be a path."""
    prefix = headers.get("x-forwarded-prefix", "").rstrip("/")
    return prefix if _PREFIX.fullmatch(prefix) else ""


class Prefixed:
    """Adds the prefix to the redirects of the router, which knows only the path behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = prefix_of(Headers(scope=scope)) if scope["type"] == "http" else ""
        if not prefix:
            await self.app(scope, receive, send)
            return

        async def send_prefixed(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == BY_ROUTER:
                headers = MutableHeaders(scope=message)
                location = urlsplit(headers["location"])
                headers["location"] = location._replace(path=prefix + location.path).geturl()
            await send(message)

        await self.app(scope, receive, send_prefixed)
