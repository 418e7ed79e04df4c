"""The ASGI layers around the app, from the outside in: counting answers, checking keys, bounding bodies.

A key is checked by the request's head, before its body is read. A body is bounded while it arrives, before it is
parsed.
"""

import asyncio
import ipaddress
import re
import sys
import time
from collections import defaultdict
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_server.api_schemas.inputs import MAX_IMAGE_CHARS
from tinker_server.api_schemas.wire import PROTOBUF
from tinker_server.auth.key import Key
from tinker_server.auth.keys import Keys
from tinker_server.auth.sign_ins import COOKIE, TOKEN_HEADER, SignIns
from tinker_server.auth.tokens import Tokens
from tinker_server.errors import (
    BodyTooLarge,
    Busy,
    ForeignHost,
    InvalidToken,
    ScopeRefused,
    TinkerServerError,
    Unauthenticated,
)
from tinker_server.observability.metrics import Metrics
from tinker_server.web import vendors
from tinker_server.web.handlers import RETRY_AFTER_S, answer, retry_after
from tinker_server.web.http import BELONGS_TO
from tinker_server.web.ledger import BYTES_PER_S, STALL_S, Ledger

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"
ANSWERS_IN_A_PASS = 4
"""Of an owner. An answer that is there already takes half a millisecond, as long as some passes without work."""
PIECES_IN_A_PASS = 1
"""Of an owner's bodies: 64 to 256 KiB. To read it, the loop gives the interpreter away three times, and a thread that
decodes another body keeps it for milliseconds each time."""
NO_ROUTE = "none"
"""Route of requests that the gate refused, or that no route matches."""
API = "/api/v1/"
OPEN = tuple(API + path for path in ("healthz", "files/", "archives/", "traces/", "uploads/"))
"""Paths that need no key: the health check, and signed links."""
OWN_KEY = "auth/apikey/me"
"""Path at which every key may ask for itself, and revoke itself."""
TOKEN = "eyJ"
"""Beginning of every token: its head is the encoded beginning of a JSON object."""
INVALID_TOKEN = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
"""Header with which the SDK gets a new token for its key (RFC 6750)."""
SAMPLING = frozenset(
    {
        "client/config",
        "client/dynamic_config",
        "auth/token",
        "telemetry",
        "get_server_capabilities",
        "create_session",
        "session_heartbeat",
        "create_sampling_session",
        "join_sampling_session",
        "asample",
        "retrieve_future",
        "retrieve_futures",
        "cancel_future",
        "weights_info",
    }
)
"""Paths that a key of the scope `sample` may use, below API. Any other path is refused: a new route is, too."""
SAMPLING_BELOW = ("samplers/",)
FINISH = re.compile(r"sessions/[^/]+/finish")
"""Path with which a client ends its session, for every scope that creates sessions."""
LARGE_BODIES = {f"/api/v1/{name}" for name in ("forward_backward", "forward", "asample")} | vendors.LARGE
"""Paths of batches and prompts. All other bodies are small."""
SMALL_BODY_BYTES = 1 << 20
SMALL_BODY_VALUES = 1 << 13
SIGN_IN, SIGN_IN_BYTES = "/login", 4 << 10
"""A form with a key. Nobody is known yet: larger bodies of some would leave no room for those of others."""
"""So many values are parsed and checked in a few milliseconds."""
LARGE_BODY_VALUES = 1 << 20
"""Values of a JSON body with a batch or a prompt: Python parses it without a pause, and nothing else runs meanwhile."""
UPLOADS = API + "uploads/"
"""Files of uploads, which go to the disk as they come. Their route bounds their bytes and their time."""
_SLICE_BYTES = 1 << 20


def largest_body(path: str, max_body_bytes: int) -> int:
    """Return the most bytes that a route's body may have, also when it is decompressed."""
    if path.startswith(UPLOADS):
        return sys.maxsize
    if path == SIGN_IN:
        return SIGN_IN_BYTES
    return max_body_bytes if path in LARGE_BODIES else min(SMALL_BODY_BYTES, max_body_bytes)


def require_quick_to_parse(body: bytes) -> None:
    """Raise BodyTooLarge for a JSON body with a string that is longer than an image, or with too many values, which
    came compressed."""
    at = 0
    while at + MAX_IMAGE_CHARS < len(body):
        last = body.rfind(b'"', at, at + MAX_IMAGE_CHARS + 1)
        if last < 0:
            raise BodyTooLarge(f"the request's body has a string of more than {MAX_IMAGE_CHARS} characters")
        at = last + 1
    slices = (body[at : at + _SLICE_BYTES] for at in range(0, len(body), _SLICE_BYTES))
    if sum(map(_num_values, slices)) > LARGE_BODY_VALUES:
        raise BodyTooLarge(_too_many_values(LARGE_BODY_VALUES))


class Measured:
    """Counts every answer by its route, and sends few of an owner's answers in a pass of the event loop. It is the
    outermost layer, so that refusals count too.

    Clients that ask again at once, on many connections, would otherwise all be served in each pass, and what another
    owner asks for, which may take fifty passes, would wait for all of them in each.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(ANSWERS_IN_A_PASS))
        """By owner; requests without an owner share them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        metrics: Metrics = scope["app"].state.services.metrics
        began = time.monotonic()

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else OTHER
                metrics.note_answer(method, _route(scope), message["status"], time.monotonic() - began)
                turn = self._turns[scope.get("state", {}).get("owner", "")]
                await turn.acquire()
                asyncio.get_running_loop().call_soon(turn.release)
            await send(message)

        await self.app(scope, receive, send_and_count)


class Gate:
    """Answers 401 without a known key, and 403 where its scope ends. Handlers find the key as `request.state.key`, and
    its owner as `request.state.owner`.

    While no keys are configured, every key is accepted. A page in a browser of this machine could then send requests
    under a host name of its own that resolves to this server. So only local names are accepted then.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        """`host`: the address that the server listens on, which is a local name too."""
        self.app = app
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        keys: Keys = scope["app"].state.services.keys
        tokens: Tokens = scope["app"].state.services.tokens
        headers = Headers(scope=scope)
        try:
            if keys.is_open:
                self._require_local(headers)
            if (vendor := vendors.vendor_of(scope["path"])) is not None or (
                scope["path"].startswith(API) and not scope["path"].startswith(OPEN)
            ):
                sent = headers.get("x-api-key") or (None if vendor is None else _bearer(headers))
                signed_in = self._find_page_key(scope, headers) if vendor is not None and sent is None else None
                key = signed_in or find_key(sent, keys, tokens, reads_bearer=vendor is not None)
                require_scope(key, scope["path"], is_chat=vendor is not None)
                state = scope.setdefault("state", {})
                state.update(key=key, owner=key.name)
                if BELONGS_TO in state:
                    state[BELONGS_TO](key.name)
        except TinkerServerError as error:
            extra = INVALID_TOKEN if isinstance(error, InvalidToken) else retry_after(error.status)
            await answer(scope["path"], error.status, error, str(error), extra)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _require_local(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_local(f"//{host}"):
            raise ForeignHost(f"the header Host is {host[:100]!r}, which is no name of this machine")
        if origin is not None and not self._is_local(origin):
            raise ForeignHost(f"the header Origin is {origin[:100]!r}, which is no page of this machine")

    def _find_page_key(self, scope: Scope, headers: Headers) -> Key | None:
        """Return the key of a dashboard page, which has cookie and token in its place; None for all others."""
        sign_ins: SignIns = scope["app"].state.services.sign_ins
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        is_ours = sign_ins.is_token(headers.get(TOKEN_HEADER, ""), cookie)
        return sign_ins.key(cookie) if is_ours else None

    def _is_local(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self.host.lower()):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


class BodyLimit:
    """Answers 413 to a body that is too large, and 408 to a slow body. uvicorn discards the rest of it. Large bodies of
    an owner are read in turn, few pieces in a pass of the event loop, so that many of them do not slow others down."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(PIECES_IN_A_PASS))
        """By owner; requests without an owner share them."""

    async def __call__(  # noqa: C901 - the bounds share their counts
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit, most_values = largest_body(scope["path"], self.max_bytes), _most_values(scope["path"], headers)
        num_bytes = num_commas = num_brackets = 0

        declared = int(headers.get("content-length", "0"))
        size_bytes = limit if "transfer-encoding" in headers else declared
        loop = asyncio.get_running_loop()
        until_s, is_whole = loop.time() + STALL_S + size_bytes / BYTES_PER_S, not size_bytes

        async def receive_and_count() -> Message:
            nonlocal num_bytes, num_commas, num_brackets, is_whole
            if is_whole:  # the only message that follows is the disconnect
                return await receive()
            if num_bytes:  # uvicorn reads no more from the connection meanwhile
                await turn.acquire()
                loop.call_soon(turn.release)
            try:
                async with asyncio.timeout_at(min(until_s, loop.time() + STALL_S)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, _too_slow(num_bytes, size_bytes), {"Connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            body = message.get("body", b"")
            num_bytes += len(body)
            if most_values is not None:
                num_commas += body.count(b",")
                num_brackets += _num_brackets(body)
            if num_bytes > limit:
                raise HTTPException(BodyTooLarge.status, _too_large(limit))  # FastAPI makes a 400 of any other error
            if most_values is not None and num_commas + num_brackets > most_values:
                # Brackets without end make no large body but a malformed body, and are answered so.
                status = 422 if num_brackets > most_values else BodyTooLarge.status
                raise HTTPException(status, _too_many_values(most_values))
            if is_whole and num_bytes < in_memory:
                came(num_bytes)
            return message

        if declared > limit:
            await answer(scope["path"], 413, BodyTooLarge(), _too_large(limit))(scope, receive, send)
            return
        in_memory = 1 if scope["path"].startswith(UPLOADS) else size_bytes
        ledger: Ledger = scope["app"].state.services.ledger
        owner = scope.get("state", {}).get("owner") or ""
        turn = self._turns[owner]
        if not size_bytes:
            await self.app(scope, receive_and_count, send)
            return
        try:
            async with ledger.body(owner, in_memory) as came:
                await self.app(scope, receive_and_count, send)
        except Busy as error:
            await answer(scope["path"], error.status, error, str(error), {"Retry-After": RETRY_AFTER_S})(
                scope, receive, send
            )


def _route(scope: Scope) -> str:
    """Return the path with names in place of ids, which is a route of the server."""
    path: str = getattr(scope.get("route"), "path", NO_ROUTE)
    return path


def _bearer(headers: Headers) -> str | None:
    """Return the key as clients of the chat endpoints send it."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def find_key(sent: str | None, keys: Keys, tokens: Tokens, *, reads_bearer: bool) -> Key:
    """Return the key that a request has sent, itself or as a token. Raises Unauthenticated."""
    if not sent:
        also = ", or as `Authorization: Bearer KEY`" if reads_bearer else ""
        raise Unauthenticated(f"no API key was sent: send it in the header X-API-Key{also}")
    found = keys.find(sent) or (tokens.find(sent) if sent.startswith(TOKEN) else None)
    if found is None and sent.startswith(TOKEN):
        raise InvalidToken("the token was not made here, has expired, or its API key was removed")
    if found is None:
        what = "begins with neither 'tml-' nor 'eyJ'" if keys.is_open else "is not known here, or has expired"
        raise Unauthenticated(f"the API key {what}")
    return found


def require_scope(key: Key, path: str, *, is_chat: bool) -> None:
    """Raise ScopeRefused unless the key's scope includes a path of the API, or of the chat endpoints."""
    name = path.removeprefix(API)
    if key.scope == "all" or name == OWN_KEY:
        return
    is_sampling = name in SAMPLING or name.startswith(SAMPLING_BELOW) or FINISH.fullmatch(name) is not None
    if key.scope == "sample" and (is_chat or is_sampling):
        return
    allowed = "sampling and the chat endpoints" if key.scope == "sample" else "/metrics"
    raise ScopeRefused(f"the API key {key.id} of {key.name} has the scope {key.scope}: it is for {allowed}, not {path}")


def _most_values(path: str, headers: Headers) -> int | None:
    """Return the most values; None for a body that is not JSON, or not yet, where one byte in 256 is a comma anyway.

    A chat is JSON, whatever its Content-Type says.
    """
    if path.startswith(UPLOADS):
        return None
    if path not in LARGE_BODIES:
        return SMALL_BODY_VALUES
    is_json = "content-encoding" not in headers and not headers.get("content-type", "").startswith(PROTOBUF)
    return LARGE_BODY_VALUES if is_json or path in vendors.LARGE else None


def _num_values(body: bytes) -> int:
    """Return the most values that a piece of JSON has: a comma is between two, and each bracket begins a value."""
    return body.count(b",") + _num_brackets(body)


def _num_brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


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
