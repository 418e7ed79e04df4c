"""The headers that say how a request's body is encoded: the same rule for all routes, applied before the body is
read."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from tinker_server.api_schemas.wire import JSON
from tinker_server.errors import BadRequest
from tinker_server.web import vendors
from tinker_server.web.gate import API, LARGE_BODIES, UPLOADS
from tinker_server.web.handlers import answer

FORM = "application/x-www-form-urlencoded"
"""What `curl -d` sends if no Content-Type is given. The routes of the API take no forms."""
COMPRESSED = LARGE_BODIES - vendors.LARGE
"""Paths of bodies that may come as zstd. The chat endpoints' clients do not compress."""


class BodyForm:
    """Refuses encodings that a route cannot read, and takes a body of the API without a type, or as FORM, as JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        allowed = ("identity", "zstd") if path in COMPRESSED else ("identity",)
        if encoding not in allowed:
            text = f"Content-Encoding {encoding[:100]!r} is not supported by {path}: "
            text += "zstd is, or none" if path in COMPRESSED else "send the body as it is, without this header"
            await answer(path, BadRequest.status, BadRequest(), text)(scope, receive, send)
            return
        is_api = path.startswith(API) and not path.startswith(UPLOADS)
        if is_api or vendors.vendor_of(path) is not None:
            content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type in ("", FORM):
                # In the caller's scope, where the router notes the route that the metrics name.
                scope["headers"] = list(scope["headers"])
                MutableHeaders(scope=scope)["content-type"] = JSON
        await self.app(scope, receive, send)
