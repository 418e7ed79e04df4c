"""The order in which messages leave: owners in turn, each owner's in order."""

import asyncio
import socket
from typing import Any

from tinker_server.backends.processes.messages import Outbox, read_message

FILLS_SOCKETS = bytes(16 << 20)


async def test_a_message_waits_for_a_single_message_of_each_other_owner() -> None:
    """A cancellation stays behind the command that it is of."""
    ours, theirs = socket.socketpair()
    (_, writer), (reader, other) = [await asyncio.open_connection(sock=end) for end in (ours, theirs)]
    outbox = Outbox(writer, "a child")
    for number in range(3):
        outbox.send((number, FILLS_SOCKETS), owner="alice")
    await asyncio.sleep(0.05)  # the first is on its way
    outbox.send((2, None), owner="alice")
    for number in (10, 11):
        outbox.send((number, "small"), owner="bob")
    outbox.send((20, "of nobody"))
    received: list[Any] = [await read_message(reader) for _ in range(7)]
    assert [number for number, _ in received] == [0, 1, 10, 20, 2, 11, 2]
    assert received[-1] == (2, None)
    outbox.close()
    other.close()
