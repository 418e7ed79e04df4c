"""The connections to PostgreSQL, and what is done so that a network that falls silent does not hold them for long."""

import socket
import sys
import uuid
from typing import Any
from weakref import WeakSet

CONNECT_S = 5.0
"""For a new connection, until it can be used."""
IDLE_S, BETWEEN_S, PROBES = 10, 5, 3
"""After so much silence the kernel asks the other end, so often, and then ends the connection."""
UNACKNOWLEDGED_S = 25
"""What was sent and is not acknowledged after this time ends the connection, too."""
ABANDONED_S = 60
"""PostgreSQL ends a transaction whose server says nothing for so long: its locks would keep the next one waiting."""
_SETTINGS = (
    "SET application_name = '{name}';"
    f" SET tcp_keepalives_idle = {IDLE_S}; SET tcp_keepalives_interval = {BETWEEN_S};"
    f" SET tcp_keepalives_count = {PROBES}; SET idle_in_transaction_session_timeout = '{ABANDONED_S}s'"
)


_END = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE application_name LIKE $1 || '%' AND application_name <> $2"
)


class Connections:
    """All that are open."""

    def __init__(self) -> None:
        self._open: WeakSet[Any] = WeakSet()
        self._server = f"tinker-server {uuid.uuid4().hex[:12]}"
        self._num_aborts = self._num_ended = 0

    def set_up(self, adapted: Any, _: object) -> None:
        """Have both ends notice that the other is gone; first of all, end what PostgreSQL still has of aborted ones."""
        driver = adapted.driver_connection
        self._open.add(driver)
        _keep_alive(driver._transport.get_extra_info("socket"))  # asyncpg has no other way to it
        aborts = self._num_aborts
        name = f"{self._server} {aborts}"
        adapted.run_async(lambda connection: connection.execute(_SETTINGS.format(name=name)))
        if self._num_ended < aborts:
            # They may hold locks that what is tried again now would wait for.
            adapted.run_async(lambda connection: connection.execute(_END, self._server, name))
            self._num_ended = aborts

    def abort(self) -> None:
        """End all at once, without a word to PostgreSQL: whoever waits for it fails now, and may connect anew."""
        self._num_aborts += 1
        for driver in list(self._open):
            driver.terminate()


def _keep_alive(connected: Any) -> None:
    if connected is None or connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
