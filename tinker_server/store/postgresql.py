"""The connections to PostgreSQL, with time limits against a network that falls silent."""

import socket
import sys
import uuid
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

from sqlalchemy import AdaptedConnection

CONNECT_S = 5.0
"""Seconds until a new connection can be used."""
IDLE_S, BETWEEN_S, PROBES = 10, 5, 3
"""TCP keepalive: the kernel probes after so much silence, and ends the connection after so many probes."""
UNACKNOWLEDGED_S = 25
"""Data that is not acknowledged after this time ends the connection, too (TCP_USER_TIMEOUT)."""
ABANDONED_S = 60
"""PostgreSQL ends a transaction whose server is silent for so long: its locks would keep the next server waiting."""
_SETTINGS = (
    "SET application_name = '{name}';"
    f" SET tcp_keepalives_idle = {IDLE_S}; SET tcp_keepalives_interval = {BETWEEN_S};"
    f" SET tcp_keepalives_count = {PROBES}; SET idle_in_transaction_session_timeout = '{ABANDONED_S}s'"
)
_NUMERIC: Mapping[str, Any] = {
    "schema": "pg_catalog",
    "encoder": str,
    "decoder": lambda text: int(text) if text.lstrip("-").isdigit() else float(text),
}
"""Reads a numeric, PostgreSQL's type of sums and quotients of integers, as an int or a float like SQLite's: JSON takes
no Decimal."""
_END = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE application_name LIKE $1 || '%' AND application_name <> $2"
)


class _Driver(Protocol):
    """A connection of asyncpg's."""

    def terminate(self) -> None:
        """Close it at once."""


class Connections:
    """The open connections."""

    def __init__(self) -> None:
        self._open: WeakSet[_Driver] = WeakSet()
        self._name = f"tinker-server {uuid.uuid4().hex[:12]}"
        """Beginning of every connection's `application_name`; the number of aborts before it follows."""
        self._num_aborts = self._num_ended = 0
        """Calls of `abort`, and those whose connections PostgreSQL was told to end."""

    def set_up(self, adapted: AdaptedConnection, _: object) -> None:
        """Set a new connection's time limits and numbers; first, end the aborted connections that PostgreSQL still
        has."""
        driver = adapted.driver_connection
        self._open.add(driver)
        _keep_alive(driver._transport.get_extra_info("socket"))  # asyncpg offers no other way
        aborts = self._num_aborts
        name = f"{self._name} {aborts}"
        adapted.run_async(lambda connection: connection.execute(_SETTINGS.format(name=name)))
        adapted.run_async(lambda connection: connection.set_type_codec("numeric", **_NUMERIC))
        if self._num_ended < aborts:
            # They may hold locks that the retried transactions would wait for.
            adapted.run_async(lambda connection: connection.execute(_END, self._name, name))
            self._num_ended = aborts

    def abort(self) -> None:
        """End all connections at once, without telling PostgreSQL: statements in flight fail now and can be retried."""
        self._num_aborts += 1
        for driver in list(self._open):
            driver.terminate()


def _keep_alive(connected: socket.socket | None) -> None:
    if connected is None or connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
