"""Answers that are the same for everybody as long as the server runs: made once, since no key is needed to ask."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping

from fastapi import Request, Response


class FixedPage:
    """A body that is made by the first request for it. A client that has it is answered 304."""

    def __init__(self, make: Callable[[], bytes], media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self._make = make
        self._media_type = media_type
        self._headers = {"Cache-Control": "no-cache", **(headers or {})}
        self._made: asyncio.Future[bytes] | None = None

    async def answer(self, request: Request) -> Response:
        """Answer with the body, or with 304."""
        if self._made is None:
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        body = await asyncio.shield(self._made)  # it goes on for others if this client disconnects
        headers = self._headers | {"ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=self._media_type)
