"""The memory budget of what is in flight: an account per owner, charged before a body's first byte is read, and before
a large result is read from the database.

A body costs its length while it is received and handled. While it is decoded it also costs its decompressed length.
A result costs its length until its client has read it. Fair queues grant all this. Requests without an
owner share an account.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tinker_server.accounts import WAIT_S, Accounts
from tinker_server.backends.processes.fair_queue import FairQueue

BODIES_OF_OWNER, BODIES_OF_ALL, BODIES_DECODED = 4, 8, 1
"""Budgets, in bodies of the largest size: an owner's, all owners', and for decoding."""
RESULTS_OF_OWNER, RESULTS_OF_ALL = 1, 2
"""Budgets of results that are sent, in bodies of the largest size; a larger result is sent alone."""
LEAST_BYTES = 64 << 10
"""Least cost of a request with a body: its connection, its buffers, its task."""
STALL_S, BYTES_PER_S = 60.0, 32 << 10
"""Longest pause of a body, and its least rate on the whole: eight parts of 60 MB that share an uplink of 1 MB/s come
four times as fast."""


class Ledger:
    """Grants the bodies and the results of all owners their part of the server's memory."""

    def __init__(self, max_body_bytes: int) -> None:
        self.bodies = _of_bytes(BODIES_OF_OWNER * max_body_bytes, BODIES_OF_ALL * max_body_bytes)
        self.results = _of_bytes(RESULTS_OF_OWNER * max_body_bytes, RESULTS_OF_ALL * max_body_bytes)
        self._decoding = FairQueue(BODIES_DECODED * max_body_bytes)

    def body(self, owner: str, size_bytes: int) -> AbstractAsyncContextManager[Callable[[int], None]]:
        """Hold room for a body while the block runs; what it yields takes the bytes that came, and gives back the rest.

        Raises Busy if there is no room for a while.
        """
        return self.bodies.hold(owner, size_bytes, LEAST_BYTES)

    def result(self, owner: str, size_bytes: int) -> AbstractAsyncContextManager[object]:
        """Hold room for a result until its client has read it. Raises Busy as `body` does."""
        return self.results.hold(owner, size_bytes)

    def decoding(self, owner: str, size_bytes: int) -> AbstractAsyncContextManager[object]:
        """Hold room for decoding a body that decompresses to so many bytes."""
        return self._decoding.grant(owner, "", size_bytes)


def _of_bytes(of_owner: int, of_all: int) -> Accounts:
    return Accounts(of_owner, of_all, _refusal(f"requests of {of_owner} bytes are in flight"))


def _refusal(reason: str) -> str:
    return f"{reason}, for {WAIT_S:g} s; send this one later"
