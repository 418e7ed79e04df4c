"""How large a body may be, and how long it may take. Told while it arrives, before anything of it is parsed."""

import asyncio
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.wire import PROTOBUF
from tinker_server.errors import BodyTooLarge, Busy
from tinker_server.web import vendors
from tinker_server.web.handlers import RETRY_AFTER_S, answer
from tinker_server.web.ledger import BYTES_PER_S, STALL_S, Ledger

LARGE_BODIES = {f"/api/v1/{name}" for name in ("forward_backward", "forward", "asample")} | vendors.LARGE
"""What carries batches and prompts. All else is small."""
SMALL_BODY_BYTES = 1 << 20
SMALL_BODY_VALUES = 1 << 13
"""So many are parsed and checked in a few milliseconds."""
LARGE_BODY_VALUES = 1 << 20
"""Of a JSON body that carries a batch or a prompt: Python parses it in one go, and nothing else runs meanwhile."""
_SLICE_BYTES = 1 << 20


def largest_body(path: str, max_body_bytes: int) -> int:
    """Bytes that a body of a route may have, also when it is decompressed."""
    return max_body_bytes if path in LARGE_BODIES else min(SMALL_BODY_BYTES, max_body_bytes)


def require_few_values(body: bytes) -> None:
    """Of a JSON body that came compressed. Raises BodyTooLarge."""
    slices = (body[at : at + _SLICE_BYTES] for at in range(0, len(body), _SLICE_BYTES))
    if sum(map(_num_values, slices)) > LARGE_BODY_VALUES:
        raise BodyTooLarge(_too_many_values(LARGE_BODY_VALUES))


class BodyLimit:
    """Answers 413 to a larger body, and 408 to a slower one. uvicorn throws away what the client still sends."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        limit, most_values = largest_body(scope["path"], self.max_bytes), _most_values(scope["path"], headers)
        num_bytes = num_values = 0

        declared = int(headers.get("content-length", "0"))
        size_bytes = limit if "transfer-encoding" in headers else declared
        loop = asyncio.get_running_loop()
        until_s, is_whole = loop.time() + STALL_S + size_bytes / BYTES_PER_S, not size_bytes

        async def counted() -> Message:
            nonlocal num_bytes, num_values, is_whole
            if is_whole:  # what comes then is that the client hangs up
                return await receive()
            try:
                async with asyncio.timeout_at(min(until_s, loop.time() + STALL_S)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, _too_slow(num_bytes, size_bytes), {"Connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            body = message.get("body", b"")
            num_bytes += len(body)
            num_values += 0 if most_values is None else _num_values(body)
            if num_bytes > limit:
                raise HTTPException(BodyTooLarge.status, _too_large(limit))  # FastAPI makes a 400 of any other error
            if most_values is not None and num_values > most_values:
                raise HTTPException(BodyTooLarge.status, _too_many_values(most_values))
            if is_whole:
                receiving.close()
                came(num_bytes)
            return message

        if declared > limit:
            return await answer(scope["path"], 413, BodyTooLarge(), _too_large(limit))(scope, receive, send)
        ledger: Ledger = scope["app"].state.services.ledger
        owner = scope.get("state", {}).get("owner") or ""
        with ExitStack() as receiving:
            if not size_bytes:
                return await self.app(scope, counted, send)
            try:
                async with ledger.body(owner, size_bytes) as came:
                    receiving.enter_context(ledger.received(owner))
                    await self.app(scope, counted, send)
            except Busy as error:
                await answer(scope["path"], error.status, error, str(error), {"Retry-After": RETRY_AFTER_S})(
                    scope, receive, send
                )


def _most_values(path: str, headers: Headers) -> int | None:
    """None where the body is not JSON yet: one byte in 256 of any other is a comma. A chat is JSON, whatever it is
    called."""
    if path not in LARGE_BODIES:
        return SMALL_BODY_VALUES
    is_json = "content-encoding" not in headers and not headers.get("content-type", "").startswith(PROTOBUF)
    return LARGE_BODY_VALUES if is_json or path in vendors.LARGE else None


def _num_values(body: bytes) -> int:
    """Values of a piece of JSON at most: a comma is between two, and a bracket begins one, whatever is in it."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _too_slow(num_bytes: int, size_bytes: int) -> str:
    return (
        f"{num_bytes} of the request's body's {size_bytes} bytes came; it must go on within {STALL_S:g} s, and come at"
        f" {BYTES_PER_S} bytes a second"
    )


def _too_large(limit: int) -> str:
    return f"the request's body is larger than {limit} bytes"


def _too_many_values(limit: int) -> str:
    return (
        f"the request's body has more than {limit} values (commas and brackets); send less at once, or protobuf where"
        " it may be"
    )
