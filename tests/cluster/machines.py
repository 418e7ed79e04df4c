"""Machines of a cluster, all of them this one: each has a Ray of its own."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.servers import MODEL
from tinker_server.backends.cluster.client import Address, Cluster, ExistingRay, Node, StartThere, Use
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.protocol import ignore_loading

GPUS = "4,5"
"""Those that a machine shows its processes."""


def free_port() -> int:
    """A port with two free ones behind it, as a cluster needs it."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except OSError:
                continue
            return port


class NoUse:
    """Every machine may join, and none is used."""

    def check(self, offer: Offer) -> None: ...

    def begin(self, node: Node, start: StartThere) -> None: ...

    async def end(self, node: Node) -> None: ...


@asynccontextmanager
async def started(
    directory: Path, *uses: Use, models: Mapping[str, str] | None = None, existing: ExistingRay | None = None
) -> AsyncIterator[Cluster]:
    address = Address("127.0.0.1", free_port())
    cluster = Cluster(address, directory / "token", uses, models or {}, existing)
    try:
        await cluster.start(ignore_loading)
        yield cluster
    finally:
        await cluster.stop()


class Machine:
    """`tinker-server join`, in a process of its own."""

    def __init__(self, address: str, token_file: Path, name: str, model: Path | None) -> None:
        """Without a directory of the model it is fetched."""
        self._command = ["join", address, "--token-file", str(token_file), "--name", name]
        self._command += ["--data-dir", str(token_file.parent / f"machine-{name}")]
        self._command += ["--model", MODEL if model is None else f"{MODEL}={model}"]

    async def start(self) -> "Machine":
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinker_server", *self._command),
            stderr=asyncio.subprocess.PIPE,
            env=environment | {"CUDA_VISIBLE_DEVICES": GPUS},
        )
        return self

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and all that it has said."""
        _, said = await self.process.communicate()
        return await self.process.wait(), said.decode()

    async def stop(self, by: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        if self.process.returncode is None:
            self.process.send_signal(by)
        return await self.ended()


@asynccontextmanager
async def joined(cluster: Cluster, name: str, model: Path | None) -> AsyncIterator[Machine]:
    """A machine that has joined a cluster."""
    machine = await Machine(address_of(cluster), cluster.token_file, name, model).start()
    try:
        await until(lambda: is_alive(cluster, name))
        yield machine
    finally:
        await machine.stop()


def address_of(cluster: Cluster) -> str:
    return f"{cluster.address.host}:{cluster.address.port}"


def is_alive(cluster: Cluster, name: str) -> bool:
    return any(node.name == name and node.is_alive for node in cluster.states())


async def until(holds: Callable[[], bool], limit_s: float = 200) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - whatever it is
            await asyncio.sleep(0.1)


def rays() -> set[int]:
    """The processes of all Rays of a test that has the fixture `temporary`."""
    found = psutil.process_iter(["cmdline"])
    return {one.pid for one in found if any(os.environ["TMPDIR"] in part for part in one.info["cmdline"] or ())}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
