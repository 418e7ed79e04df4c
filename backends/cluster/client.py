"""The cluster, as the server's own process knows it: the port that other machines join at, the machines that have, and
the process with Ray's head beneath it (`head.py`). Imports no Ray.

A machine belongs to the cluster while its connection to our port lives. When Ray's head has died, all connections are
closed: the machines join again, once it is back.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from backends.cluster.commands import StartHead
from backends.cluster.handshake import Connection, accept
from backends.cluster.ray_commands import ray_environment
from backends.cluster.token import made_token
from backends.cluster.versions import differences, require_ray, versions
from backends.processes.launcher import launch, local_address
from backends.processes.rpc import Child
from backends.processes.supervisor import Supervisor
from backends.protocol import BackendFailed, NodeState, OnLoading, ProcessState

log = logging.getLogger(__name__)


@dataclass
class Node:
    """A machine that has joined, and has not left."""

    name: str
    address: str
    connection: Connection | None = None
    """None while it is lost."""
    is_leaving: bool = False


@dataclass(frozen=True)
class Address:
    """The addresses at which other machines reach this one."""

    host: str
    port: int
    """Of our own port; Ray takes the two behind it."""

    @property
    def ray_port(self) -> int:
        """The port of Ray's head."""
        return self.port + 1


@dataclass
class Cluster:
    """The serving machine's end of the cluster."""

    address: Address
    token_file: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    """Those that have joined, by name, the lost ones too."""

    def __post_init__(self) -> None:
        self._token = ""
        self._listener: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._supervisor = Supervisor("the cluster's head", self._launch, self._load, restart=self._restart)

    @classmethod
    def at(cls, host: str | None, port: int, token_file: Path) -> "Cluster":
        """Make the cluster of a server that others reach at `host`, or at this machine's own address."""
        return cls(Address(host or local_address(), port), token_file)

    async def start(self, on_loading: OnLoading) -> None:
        """Start Ray's head and listen. Raises BackendFailed."""
        require_ray()
        self._token = made_token(self.token_file)
        host, port = self.address.host, self.address.port
        try:
            self._listener = await asyncio.start_server(self._take, host, port)
        except OSError as error:
            raise BackendFailed(f"the cluster cannot listen on {host} port {port}: {error.strerror}") from None
        await self._supervisor.start(on_loading)
        log.info(
            "other machines join with: tinker-server join %s:%d --token-file FILE, a copy of %s",
            *(host, port, self.token_file),
        )

    async def stop(self) -> None:
        """Let all machines go, and end Ray."""
        if self._listener is not None:
            self._listener.close()
        for writer in self._serving.values():
            writer.close()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._supervisor.stop()

    def processes(self) -> list[ProcessState]:
        """Return the state of the process with Ray's head."""
        return self._supervisor.processes()

    def states(self) -> list[NodeState]:
        """Return the machines that have joined and not left."""
        return [NodeState(node.name, node.address, node.connection is not None) for node in self.nodes.values()]

    async def _launch(self) -> list[Child]:
        return [await launch("cluster head", "backends.cluster.head", ray_environment(self.token_file))]

    async def _load(self, children: list[Child]) -> None:
        for node in self.nodes.values():  # their Ray belonged to the head before
            if node.connection is not None:
                node.connection.close()
        [child] = children
        await child.call(StartHead(self.address.host, self.address.ray_port))

    async def _restart(self) -> None:
        await self._supervisor.running()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to our port."""
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)
        connection = await accept(reader, writer, self._token)
        if connection is None:
            log.warning("a connection to the cluster's port, from %s, had no right token", _peer(writer))
            return
        try:
            match connection.said.get("ask"):
                case "join":
                    await self._join(connection)
                case "leave":
                    self._leave(connection)
                case other:
                    connection.send(refused=f"it knows no request {other!r}")
        finally:
            connection.close()

    async def _join(self, connection: Connection) -> None:
        name, theirs = str(connection.said.get("name")), dict(connection.said.get("versions", {}))
        if different := differences(theirs, versions()):
            connection.send(refused=f"this machine has {different}: install the same")
            return
        if not self._supervisor.is_alive:
            connection.send(later="the server is starting Ray")
            return
        node = self.nodes.setdefault(name, Node(name, ""))
        if node.connection is not None:
            connection.send(refused=f"a machine of the name {name} is there already: give this one another --name")
            return
        node.address, node.connection = _peer(connection.writer), connection
        log.info("%s joins from %s", name, node.address)
        connection.send(ray_port=self.address.ray_port)
        try:
            while (said := await connection.receive()) is not None:
                node.is_leaving = node.is_leaving or said.get("leaves") is True
        finally:
            node.connection = None
            if node.is_leaving:
                del self.nodes[name]
            log.warning("%s has %s", name, "left" if node.is_leaving else "been lost: it may join again")

    def _leave(self, connection: Connection) -> None:
        """Have a machine leave that somebody names."""
        name = str(connection.said.get("name"))
        if (node := self.nodes.get(name)) is None:
            names = ", ".join(self.nodes) or "none"
            connection.send(refused=f"no machine of the name {name} has joined; there are {names}")
            return
        if node.connection is None:
            del self.nodes[name]
        else:
            node.is_leaving = True
            node.connection.send(leave=True)
        connection.send(leaves=name)


def _peer(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername")[0])
