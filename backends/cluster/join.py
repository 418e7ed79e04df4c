"""A machine that joins a server's cluster: it has Ray beneath it while its connection to the server lives. Imports no
Ray."""

import asyncio
import logging
import math
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tinker_server.backends.cluster.fetching import fetch_files
from tinker_server.backends.cluster.handshake import Connection, Unreachable, connect
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.cluster.ray_commands import NODE_LABEL, RayEnded, ray_environment, ray_running
from tinker_server.backends.cluster.token import read_token
from tinker_server.backends.cluster.versions import require_ray, versions
from tinker_server.backends.configure.gpus import all_gpus
from tinker_server.backends.files import make_private_directory
from tinker_server.backends.formats.model_files import fingerprint, local_directory
from tinker_server.backends.processes.launcher import read_environment
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
_SOON_S = 30.0
"""Ray that ends sooner would do so again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
WAIT_S = 600.0
"""A server that starts at the same time loads its models before it answers."""
T = TypeVar("T")


async def until_answered(ask: Callable[[], Awaitable[T]], for_s: float = WAIT_S) -> T:
    """Return what a server answers, who is asked again while none does. Raises Unreachable after `for_s`."""
    pause_s, deadline = _FIRST_PAUSE_S, time.monotonic() + for_s
    while True:
        try:
            return await ask()
        except Unreachable as error:
            if time.monotonic() + pause_s > deadline:
                raise
            log.warning("%s; retrying in %.0f s", error, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def join(own: Offer) -> None:
    """Belong to the cluster until this machine is asked to leave, or cancelled; join again once the server is back.

    Raises BackendFailed where it is refused, or Unreachable if no server answers for WAIT_S before it was there at all.
    """
    require_ray()
    with tempfile.TemporaryDirectory(prefix="tinker-base-", ignore_cleanup_errors=True) as base_dir:
        await _join(replace(own, base_dir=base_dir))


async def _join(own: Offer) -> None:
    has_joined, token = False, read_token(Path(own.token_file))
    while True:
        offer = replace(own, ray_label=secrets.token_hex(8))
        connecting = partial(connect, offer.server, token, ask="join", versions=versions(), offer=offer.as_json())
        connection = await until_answered(connecting, math.inf if has_joined else WAIT_S)
        has_joined, began = True, time.monotonic()
        try:
            if await _belong(offer, connection):
                return
        except RayEnded as error:
            if time.monotonic() - began < _SOON_S:
                raise
            log.warning("%s; restarting it", error)
        finally:
            connection.close()
        await asyncio.sleep(_FIRST_PAUSE_S)


async def _belong(offer: Offer, connection: Connection) -> bool:
    """Run Ray until the connection closes; return whether this machine has been asked to leave. Raises RayEnded."""
    log.info("%s joins %s", offer.name, offer.server)
    host = offer.server.rpartition(":")[0]
    arguments = ["--address", f"{host}:{connection.said['ray_port']}", "--labels", f"{NODE_LABEL}={offer.ray_label}"]
    async with ray_running(arguments, ray_environment(Path(offer.token_file))) as ray:
        listening, ended = asyncio.create_task(await_leave(connection)), asyncio.create_task(ray.wait())
        try:
            await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                raise RayEnded("Ray has ended")
            if not listening.result():
                log.warning("lost the connection to %s", offer.server)
            return listening.result()
        except asyncio.CancelledError:
            connection.send(leaves=True)
            raise
        finally:
            listening.cancel()
            ended.cancel()


async def offer_of(name: str, server: str, token_file: Path, data_dir: Path, models: Mapping[str, str | None]) -> Offer:
    """Return what this machine has to offer, with its models' directories or hub ids; those without a directory are
    fetched from the server. Takes some seconds. Raises BackendFailed."""
    directories, token = dict[str, Path](), read_token(token_file)
    try:  # for owners' adapters, as on the serving machine
        await asyncio.to_thread(make_private_directory, data_dir)
    except OSError as error:
        raise BackendFailed(f"the data directory {data_dir} cannot be used: {error.strerror}") from None
    for model, source in models.items():
        if source is None:
            directories[model] = await fetch_files(server, token, model, data_dir / "models")
        else:
            directories[model] = await asyncio.to_thread(local_directory, source)
    return await asyncio.to_thread(_offer, name, server, token_file, data_dir, directories)


def _offer(name: str, server: str, token_file: Path, data_dir: Path, directories: Mapping[str, Path]) -> Offer:
    return Offer(
        name=name,
        server=server,
        token_file=str(token_file.absolute()),
        data_dir=str(data_dir.absolute()),
        models={model: str(directory.absolute()) for model, directory in directories.items()},
        fingerprints={model: fingerprint(directory) for model, directory in directories.items()},
        gpu_bytes=tuple(gpu.total_bytes for gpu in all_gpus()),
        environment=read_environment(),
    )


async def leave(address: str, token_file: Path, name: str) -> None:
    """Have a machine of that name leave the cluster. Raises BackendFailed."""
    connection = await connect(address, read_token(token_file), ask="leave", name=name)
    connection.close()


async def await_leave(connection: Connection) -> bool:
    """Wait until the connection closes; return whether this machine has been asked to leave."""
    while (said := await connection.receive()) is not None:
        if said.get("leave"):
            connection.send(leaves=True)
            return True
    return False
