"""A machine that joins a server's cluster: it has Ray beneath it while its connection to the server lives. Imports no
Ray."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from backends.cluster.handshake import Connection, Unreachable, connect
from backends.cluster.ray_commands import NODE_LABEL, RayEnded, ray_environment, ray_running
from backends.cluster.token import read_token
from backends.cluster.versions import require_ray, versions
from backends.processes.launcher import Guarded

log = logging.getLogger(__name__)
_SOON_S = 30.0
"""Ray that ends sooner would do so again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


@dataclass(frozen=True)
class Joining:
    """One machine, and the server that it joins."""

    address: str
    """HOST:PORT."""
    token_file: Path
    name: str

    async def run(self) -> None:
        """Belong to the cluster until it is told to leave, or cancelled; join again whenever the server is back.

        Raises BackendFailed where it is refused, or Unreachable before it was there at all.
        """
        require_ray()
        token, pause_s, has_joined = read_token(self.token_file), _FIRST_PAUSE_S, False
        while True:
            try:
                connection = await connect(self.address, token, ask="join", name=self.name, versions=versions())
            except Unreachable as error:
                if not has_joined:
                    raise
                log.warning("%s; asked again in %.0f s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            has_joined, pause_s, began = True, _FIRST_PAUSE_S, time.monotonic()
            try:
                if await self._belong(connection):
                    return
            except RayEnded as error:
                if time.monotonic() - began < _SOON_S:
                    raise
                log.warning("%s; it is started again", error)
            finally:
                connection.close()
            await asyncio.sleep(pause_s)

    async def _belong(self, connection: Connection) -> bool:
        """Run Ray until the connection closes; return whether this machine has been told to leave. Raises RayEnded."""
        log.info("%s joins %s", self.name, self.address)
        host = self.address.rpartition(":")[0]
        arguments = ["--address", f"{host}:{connection.said['ray_port']}", "--labels", f"{NODE_LABEL}={self.name}"]
        async with ray_running(arguments, ray_environment(self.token_file)) as ray:
            listening, ended = asyncio.create_task(_told_to_leave(connection)), asyncio.create_task(_ended(ray))
            try:
                await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not listening.done():
                    raise RayEnded("Ray has ended")
                if not listening.result():
                    log.warning("%s is gone", self.address)
                return listening.result()
            except asyncio.CancelledError:
                connection.send(leaves=True)
                raise
            finally:
                listening.cancel()
                ended.cancel()


async def leave(address: str, token_file: Path, name: str) -> None:
    """Have a machine of that name leave the cluster. Raises BackendFailed."""
    connection = await connect(address, read_token(token_file), ask="leave", name=name)
    connection.close()


async def _told_to_leave(connection: Connection) -> bool:
    while (said := await connection.receive()) is not None:
        if said.get("leave"):
            connection.send(leaves=True)
            return True
    return False


async def _ended(ray: Guarded) -> None:
    await ray.wait()
