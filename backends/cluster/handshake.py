"""Two machines prove to each other that they have the cluster's token, before either takes anything else.

One line of JSON each: a greeting with a nonce there, a nonce and a proof back, then a proof with the request, and its
answer. The token itself never travels. What follows on the connection is neither encrypted nor signed: the network
between the machines must be private, as Ray's must.
"""

import asyncio
import contextlib
import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from tinker_server.backends.cluster.token import is_proof, proof
from tinker_server.backends.processes.messages import STREAM_LIMIT
from tinker_server.backends.protocol import BackendFailed, Unavailable

HANDSHAKE_S = 10.0
"""Longest wait for the other machine's next line."""
_GREETING = "tinker-server cluster 1"
_IDLE_S, _PROBE_S, _NUM_PROBES = 5, 5, 3
"""A machine that is gone without a word is noticed after 20 seconds."""


class Unreachable(Unavailable):
    """Nothing answers there, or it is not ready: it may be later."""


@dataclass(frozen=True)
class Connection:
    """A connection to a machine that has the token."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: dict[str, Any]
    """What the other machine has asked for, or answered."""

    def send(self, **message: Any) -> None:
        """Send a line."""
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next line; None once the other machine has closed the connection or is gone."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            said = json.loads(await self.reader.readline())
            return said if isinstance(said, dict) else None
        return None

    def close(self) -> None:
        """Close it, after what was sent."""
        self.writer.close()


async def connect(address: str, token: str, **request: Any) -> Connection:
    """Connect to the serving machine at HOST:PORT and ask it for something. Raises Unreachable, and BackendFailed
    where it is another program's port, or has another token, or refuses."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=STREAM_LIMIT)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise Unreachable(f"no server answers at {address}: {reason}") from None
    except ValueError:
        raise BackendFailed(f"{address} is no address: write HOST:PORT") from None
    with contextlib.ExitStack() as unless_answered:
        unless_answered.callback(writer.close)
        _probe(writer)
        connection, nonce = Connection(reader, writer, {}), secrets.token_hex(16)
        connection.send(greeting=_GREETING, nonce=nonce)
        theirs = await _read_line(connection)
        if theirs.get("greeting") != _GREETING:
            raise BackendFailed(f"{address} is not the cluster port of a server of this version, which 'serve' prints")
        nonces = (nonce, str(theirs.get("nonce")))
        if not is_proof(theirs.get("proof"), token, "server", *nonces):
            raise BackendFailed(f"the server at {address} has another token: copy its token file here again")
        body = json.dumps(request)
        connection.send(proof=proof(token, "client", *nonces, body), request=body)
        answer = await _read_line(connection)
        if (later := answer.get("later")) is not None:
            raise Unreachable(str(later))
        if (refused := answer.get("refused", None if answer else "it has closed the connection")) is not None:
            raise BackendFailed(f"the server at {address} refuses: {refused}")
        unless_answered.pop_all()
    return Connection(reader, writer, answer)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Connection | None:
    """Return the connection of a machine that has the token, with its request; None for any other, which is refused
    if its token is wrong."""
    _probe(writer)
    connection = Connection(reader, writer, {})
    greeting = await _read_line(connection)
    if greeting.get("greeting") != _GREETING:
        connection.close()
        return None
    nonces = (str(greeting.get("nonce")), secrets.token_hex(16))
    connection.send(greeting=_GREETING, nonce=nonces[1], proof=proof(token, "server", *nonces))
    asked = await _read_line(connection)
    body = str(asked.get("request"))
    if not is_proof(asked.get("proof"), token, "client", *nonces, body):
        connection.send(refused="the token is wrong")
        connection.close()
        return None
    return Connection(reader, writer, dict(json.loads(body)))


async def _read_line(connection: Connection) -> dict[str, Any]:
    """Return the next line; an empty dictionary if none comes in time."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await connection.receive() or {}
    except TimeoutError:
        return {}


def _probe(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice when the other machine is gone."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _PROBE_S * _NUM_PROBES)),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
