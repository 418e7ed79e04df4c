"""The serving machine's end of a cluster."""

import asyncio
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster.connections import serving
from tests.factories import present
from tests.waiting import until
from tinker_server.backends.cluster.client import Address, Cluster
from tinker_server.backends.cluster.handshake import Unreachable, accept, connect
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.cluster.versions import versions
from tinker_server.backends.protocol import BackendFailed

TOKEN = secrets.token_hex(32)


async def test_a_machine_that_lost_its_connection_before_the_server_did_joins_again_and_a_double_is_refused(
    tmp_path: Path,
) -> None:
    cluster = Cluster(Address("127.0.0.1", 8100), tmp_path / "token", (), {})
    cluster._supervisor = SimpleNamespace(is_alive=True)  # type: ignore[assignment]

    num_open = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        await cluster._join(present(await accept(reader, writer, TOKEN)))
        writer.close()
        num_open -= 1

    async with serving(serve) as address:
        offer = Offer("m", address, "/secret", "/data", {}, {}, (), {}, base_dir="/tmp/tinker-base-1")
        ask = partial(connect, address, TOKEN, ask="join", versions=versions())
        first = await ask(offer=offer.as_json())
        with pytest.raises(BackendFailed, match="a machine of the name m is there already"):
            await ask(offer=replace(offer, base_dir="/tmp/tinker-base-2").as_json())
        with pytest.raises(Unreachable, match="former connection is being closed"):
            await ask(offer=offer.as_json())
        assert await first.receive() is None
        again = await ask(offer=offer.as_json())
        assert again.said["ray_port"] == 8101 and cluster.nodes["m"].is_alive
        for connection in (first, again):
            connection.close()
        await until(lambda: num_open == 0)
