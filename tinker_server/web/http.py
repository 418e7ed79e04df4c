"""uvicorn's HTTP/1.1, with bounds on what a client may send before anything knows who it is."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""For a request's head to be complete, and for a connection to send anything at all."""
HEAD_BYTES = 64 << 10
NUM_HEADERS = 128


class BoundedHttp(HttpToolsProtocol):
    """One connection. The parser keeps a line until it is complete, so bytes that complete nothing are counted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's does
        super().connection_made(transport)
        self._head_bytes = self._num_headers = self._idle_bytes = 0
        self._came_further = False
        self._late: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._came_further = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._idle_bytes = 0 if self._came_further else self._idle_bytes + len(data)
        if self._idle_bytes > HEAD_BYTES:
            self.send_400_response(f"A line of the request's head is longer than {HEAD_BYTES} bytes.")
        elif self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def on_message_begin(self) -> None:
        self._came_further = True
        self._head_bytes = self._num_headers = 0
        super().on_message_begin()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._num_headers += 1
        if self._head_bytes > HEAD_BYTES or self._num_headers > NUM_HEADERS:
            raise ValueError("the head is too large")  # the parser stops, and uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._came_further = True
        self._head_is_there()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._came_further = True
        super().on_body(body)

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self, *_: Any) -> None:
        self._late = None
        self.transport.close()
