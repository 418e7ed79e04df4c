"""Who is let in: told from a request's head, before any of its body is read."""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from tinker_server.auth.keys import Keys
from tinker_server.auth.sign_ins import COOKIE, TOKEN_HEADER, SignIns
from tinker_server.errors import ForeignHost, TinkerServerError, Unauthenticated
from tinker_server.web.handlers import answer
from tinker_server.web.vendors import vendor_of

API = "/api/v1/"
OPEN = tuple(API + path for path in ("healthz", "files/", "archives/", "traces/"))
"""What asks for no key: whether the server lives, and signed links."""


class Gate:
    """Answers 401 without a known key, whose owner handlers find as `request.state.owner`.

    While no keys are configured, any key is let in, and so any page that a browser of this machine shows could come in
    under a name of its own that leads here. Then only local names are let in.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        """`host`: what the server listens on, which is a local name too."""
        self.app = app
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        keys: Keys = scope["app"].state.services.keys
        headers = Headers(scope=scope)
        try:
            if keys.is_open:
                self._require_local(headers)
            if (vendor := vendor_of(scope["path"])) is not None or (
                scope["path"].startswith(API) and not scope["path"].startswith(OPEN)
            ):
                key = headers.get("x-api-key") or (None if vendor is None else _bearer(headers))
                owner = self._signed_in(scope, headers) if vendor is not None and key is None else None
                scope.setdefault("state", {})["owner"] = owner or owner_of(key, keys)
        except TinkerServerError as error:
            return await answer(scope["path"], error.status, error, str(error))(scope, receive, send)
        await self.app(scope, receive, send)

    def _require_local(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_local(f"//{host}"):
            raise ForeignHost(f"the header Host is {host[:100]!r}, which is no name of this machine")
        if origin is not None and not self._is_local(origin):
            raise ForeignHost(f"the header Origin is {origin[:100]!r}, which is no page of this machine")

    def _signed_in(self, scope: Scope, headers: Headers) -> str | None:
        """Whose page asks: one of the dashboard's, which chats too, has its cookie and its token in place of a key."""
        sign_ins: SignIns = scope["app"].state.services.sign_ins
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        is_ours = sign_ins.is_token(headers.get(TOKEN_HEADER, ""), cookie)
        return sign_ins.owner(cookie) if is_ours else None

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


def _bearer(headers: Headers) -> str | None:
    """The key as clients of the chat endpoints send it."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def owner_of(key: str | None, keys: Keys) -> str:
    """The owner that a key speaks for. Raises Unauthenticated."""
    if not key:
        raise Unauthenticated("the header X-API-Key is missing")
    owner = keys.owner_of(key)
    if owner is None:
        what = "begins with neither 'tml-' nor 'eyJ'" if keys.is_open else "is not known here"
        raise Unauthenticated(f"the API key {what}")
    return owner
