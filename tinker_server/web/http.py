"""uvicorn's HTTP/1.1 with bounds on what a client may send before its key is known, and on how long it may not read."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinker_server.web.connections import Accounts, Connections, account_of

HEAD_S = 20.0
"""Seconds for a request's head to be complete, and for a connection to send anything at all."""
UNREAD_S = 60.0
"""Seconds within which a client must have read what was sent, all but some kilobytes; a connection of a client that
does not is ended."""
HEAD_BYTES = 64 << 10
NUM_HEADERS = 128
BELONGS_TO = "connection_belongs_to"
"""Key in a request's `state` of the function that takes the owner of its key."""
CONNECTION_LOST = "connection_lost"
"""Key in a request's `state` of the future that is done once its connection is lost. Nothing is read, and no loss is
noticed, while more than 64 KiB of a body wait for the app."""
NUM_WAITING = 8
"""Requests that may wait on a connection for the answer to an earlier request. Common clients never send a second
request before the first answer; each that waits costs memory before its key is known."""


class BoundedHttp(HttpToolsProtocol):
    """A connection. The parser keeps an incomplete line, so the bytes that complete nothing are counted."""

    def __init__(self, *, connections: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._connections = connections
        self._counted: tuple[Accounts, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's does
        super().connection_made(transport)
        self._count(self._connections.strangers, account_of(self.client[0] if self.client else ""))
        self._head_bytes = self._num_headers = self._idle_bytes = 0
        self._advanced = False
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_complete()
        self._was_read()
        self._count(None, "")
        self._lost.set_result(None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._was_read()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._was_read()
        self._note_activity()
        super().resume_writing()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def belongs_to(self, owner: str) -> None:
        """Count the connection for the owner whose key has come on it."""
        self._count(self._connections.owners, owner)

    def end(self) -> None:
        """End the connection at once."""
        self._counted = None
        self.transport.abort()

    def _count(self, accounts: Accounts | None, account: str) -> None:
        if self._counted == (accounts, account):
            return
        if self._counted is not None:
            self._counted[0].remove(self._counted[1], self)
        self._counted = None if accounts is None else (accounts, account)
        if accounts is not None:
            accounts.add(account, self)
            self._connections.make_room()

    def _note_activity(self) -> None:
        if self._counted is not None:
            self._counted[0].note_activity(self._counted[1], self)

    def data_received(self, data: bytes) -> None:
        self._note_activity()
        self._advanced = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._idle_bytes = 0 if self._advanced else self._idle_bytes + len(data)
        if self._idle_bytes > HEAD_BYTES:
            self.send_400_response(f"A line of the request's head is longer than {HEAD_BYTES} bytes.")
        elif self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        """Answer 400. If earlier requests wait for their answers, end the connection: one would take it for its own."""
        if self.pipeline:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= NUM_WAITING:
            raise ValueError("too many requests wait on this connection")  # the parser stops
        self._advanced = True
        self._head_bytes = self._num_headers = 0
        super().on_message_begin()
        self.scope["state"].update({BELONGS_TO: self.belongs_to, CONNECTION_LOST: self._lost})
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._num_headers += 1
        if self._head_bytes > HEAD_BYTES or self._num_headers > NUM_HEADERS:
            raise ValueError("the head is too large")  # the parser stops, and uvicorn calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._advanced = True
        self._head_complete()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self._give_up)

    def _head_complete(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self, *_: object) -> None:
        self._deadline = None
        self.transport.close()
