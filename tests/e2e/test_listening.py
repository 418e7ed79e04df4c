"""Ports at which a server and its child processes listen."""

import ipaddress
from pathlib import Path

import psutil
import pytest

from tests.servers import MODEL, Server

pytestmark = pytest.mark.slow


def listening(server: Server) -> dict[str, set[int]]:
    """Return the ports of the server and of all that it has started, by `loopback` or `beyond`."""
    found: dict[str, set[int]] = {"loopback": set(), "beyond": set()}
    top = psutil.Process(server.process.pid)
    for process in (top, *top.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                address = ipaddress.ip_address(connection.laddr.ip)
                is_loopback = (getattr(address, "ipv4_mapped", None) or address).is_loopback
                found["loopback" if is_loopback else "beyond"].add(connection.laddr.port)
    return found


def test_a_server_of_one_machine_listens_on_loopback_alone(tiny_vl: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "data", {MODEL: tiny_vl}, "--ranks", "2").start()
    try:
        found = listening(server)
        assert server.port in found["loopback"]
        assert not found["beyond"], found
    finally:
        assert server.stop() == 0
