"""How large a body may be. Told while it arrives, before anything of it is parsed."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_server.errors import BodyTooLarge
from tinker_server.web.handlers import answer

LARGE_BODIES = {f"/api/v1/{name}" for name in ("forward_backward", "forward", "asample")}
"""What carries batches and prompts. All else is small."""
SMALL_BODY_BYTES = 1 << 20
SMALL_BODY_VALUES = 1 << 14
"""Commas, of which JSON has one less than it has values: so many are parsed and checked in a few milliseconds."""


def largest_body(path: str, max_body_bytes: int) -> int:
    """Bytes that a body of a route may have, also when it is decompressed."""
    return max_body_bytes if path in LARGE_BODIES else min(SMALL_BODY_BYTES, max_body_bytes)


class BodyLimit:
    """Answers 413 to a larger body. uvicorn throws away what the client still sends."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        is_large, limit = scope["path"] in LARGE_BODIES, largest_body(scope["path"], self.max_bytes)
        num_bytes = num_values = 0

        async def counted() -> Message:
            nonlocal num_bytes, num_values
            message = await receive()
            body = message.get("body", b"")
            num_bytes += len(body)
            if num_bytes > limit:
                raise HTTPException(BodyTooLarge.status, _too_large(limit))  # FastAPI makes a 400 of any other error
            if not is_large:
                num_values += body.count(b",")
                if num_values > SMALL_BODY_VALUES:
                    text = f"the request's body has more than {SMALL_BODY_VALUES} values (commas)"
                    raise HTTPException(BodyTooLarge.status, text)
            return message

        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(declared) > limit:
            return await answer(413, BodyTooLarge(), _too_large(limit))(scope, receive, send)
        await self.app(scope, counted, send)


def _too_large(limit: int) -> str:
    return f"the request's body is larger than {limit} bytes"
