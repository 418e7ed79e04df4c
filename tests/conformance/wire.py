"""A record of what reaches a server of fakes: for statements on which requests the SDK sends, or does not."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker.lib._jwt_auth import jwt_claims

from tinker_server.auth.key import Key, hash_of

BACKGROUND = ("/session_heartbeat", "/telemetry", "/auth/token", "/client/dynamic_config", "/retrieve_future")
"""Requests that the SDK sends at times of its own, or repeats."""
KEPT_BYTES = 1 << 20


@dataclass
class Seen:
    """One request, and its answer's status."""

    method: str
    path: str
    """Below /api/v1."""
    headers: dict[str, str]
    body: bytes = b""
    """All of it up to 1 MiB; of a longer one, the beginning."""
    status: int | None = None
    arrived: float = field(default_factory=time.monotonic)

    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.body)
        return body


class Wire:
    """Every request in order of arrival."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, recorded."""

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            seen = Seen(scope["method"], scope["path"].removeprefix("/api/v1"), headers)
            self.requests.append(seen)

            async def read() -> Message:
                message = await receive()
                if len(seen.body) < KEPT_BYTES:
                    seen.body += message.get("body", b"")
                return message

            async def answer(message: Message) -> None:
                if message["type"] == "http.response.start":
                    seen.status = message["status"]
                await send(message)

            await app(scope, read, answer)

        return recorded

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], list[Seen]]]:
        """Requests that arrive from here on, without those that the SDK sends in the background."""
        start = len(self.requests)
        yield lambda: [one for one in self.requests[start:] if one.path not in BACKGROUND]


def paths(requests: list[Seen]) -> list[str]:
    return [one.path for one in requests]


def is_of(key: str, seen: Seen) -> bool:
    """Whether a request carries a key, or a token that was made for it."""
    sent = seen.headers.get("x-api-key", "")
    return sent == key or (sent.startswith("eyJ") and jwt_claims(sent)["key"] == Key("", hash_of(key)).fingerprint)
