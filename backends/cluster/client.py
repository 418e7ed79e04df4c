"""The cluster, as the server's own process knows it: the port that other machines join at, the machines that have, and
the process with Ray's head beneath it (`head.py`). Imports no Ray.

A machine belongs to the cluster while its connection to our port lives. When Ray's head has died, all connections are
closed: the machines join again, once it is back.

In a Ray cluster that was there before the server, its nodes join by themselves, and no others may.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from tinker_server.backends.cluster.commands import EndProcess, StartHead, StartProcess, UseRay
from tinker_server.backends.cluster.fetching import give
from tinker_server.backends.cluster.handshake import HANDSHAKE_S, Connection, accept
from tinker_server.backends.cluster.lines import show
from tinker_server.backends.cluster.offer import Invitation, Offer
from tinker_server.backends.cluster.ray_commands import ray_environment
from tinker_server.backends.cluster.token import make_token
from tinker_server.backends.cluster.versions import differences, require_ray, versions
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import Place, launch, process_name
from tinker_server.backends.processes.messages import STREAM_LIMIT
from tinker_server.backends.processes.rpc import Child, Process
from tinker_server.backends.processes.supervisor import Supervisor
from tinker_server.backends.protocol import BackendFailed, NodeState, OnLoading, ProcessState

log = logging.getLogger(__name__)
_END_S = 5.0
"""Time for a machine to say that it has ended a process."""


@dataclass(eq=False)
class Node:
    """A machine from when it joins until it leaves or is lost; a machine that comes back is a new object."""

    offer: Offer
    address: str
    connection: Connection
    is_alive: bool = True
    is_leaving: bool = False


class StartThere(Protocol):
    """Starts a process of a model on a machine, by default an engine's."""

    async def __call__(self, spec: ModelSpec, place: Place = None) -> list[Child]:
        """Return the connection to the process. Raises BackendFailed."""


class Use(Protocol):
    """A use that the server makes of other machines."""

    def check(self, offer: Offer) -> None:
        """Raise BackendFailed, saying why, if a machine cannot be used."""

    def begin(self, node: Node, start: StartThere) -> None:
        """Use a machine that has joined."""

    async def end(self, node: Node) -> None:
        """Use it no longer: it has left, or is lost."""


@dataclass(frozen=True)
class Address:
    """The addresses at which other machines reach this machine."""

    host: str
    port: int
    """Of our own port; Ray takes the two behind it."""

    @property
    def ray_port(self) -> int:
        """The port of Ray's head."""
        return self.port + 1


@dataclass(frozen=True)
class ExistingRay:
    """A Ray cluster that was there before the server."""

    address: str
    """HOST:PORT of its head, or `auto` for this machine's."""
    node_dir: Path
    """Directory of other machines' files there."""

    def __post_init__(self) -> None:
        if "://" in self.address or not (self.address == "auto" or self.address.rpartition(":")[0]):
            raise BackendFailed(
                f"RAY_ADDRESS={self.address}: a Ray cluster is used by HOST:PORT of its head, or auto, from one of its"
                " own machines, and not through Ray's client"
            )


@dataclass
class Cluster:
    """The serving machine's end of the cluster."""

    address: Address
    token_file: Path
    uses: Sequence[Use]
    models: Mapping[str, str]
    """Directories of the served models on this machine, by name."""
    existing: ExistingRay | None = None
    """The Ray cluster to use in place of our own."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """Those that have joined, by name, lost machines included."""

    def __post_init__(self) -> None:
        self._token = ""
        self._listener: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._expected: dict[str, asyncio.Future[Connection]] = {}
        """Connections that machines have been asked to open, by their key."""
        self._supervisor = Supervisor(
            "the cluster's head", self._launch, self._load, restart=lambda: self._supervisor.running()
        )

    async def start(self, on_loading: OnLoading) -> None:
        """Start Ray's head and listen. Raises BackendFailed."""
        require_ray()
        self._token = make_token(self.token_file)
        host, port = self.address.host, self.address.port
        try:
            self._listener = await asyncio.start_server(self._take, host, port, limit=STREAM_LIMIT)
        except OSError as error:
            raise BackendFailed(f"the cluster cannot listen on {host} port {port}: {error.strerror}") from None
        await self._supervisor.start(on_loading)
        if self.existing is not None:
            log.info("every other machine of the Ray cluster at %s joins by itself", self.existing.address)
            return
        log.info(
            "other machines join with: tinker-server join %s:%d --token-file FILE --model NAME; FILE is a copy of"
            " %s, and NAME=DIRECTORY_OR_HUB_ID takes a model's files from there",
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
        return [NodeState(name, node.address, node.is_alive) for name, node in self.nodes.items()]

    async def _start_there(self, node: Node, spec: ModelSpec, place: Place = None) -> list[Child]:
        """Start a process on a machine. Raises BackendFailed."""
        if not node.is_alive:
            raise BackendFailed(f"the machine {node.offer.name} is lost")
        key, name = secrets.token_hex(16), f"{process_name(spec, place)} on {node.offer.name}"
        expected = self._expected[key] = asyncio.get_running_loop().create_future()
        try:
            [head] = await self._supervisor.running()
            pid = await head.call(StartProcess(node.offer, key, spec, place))
            async with asyncio.timeout(HANDSHAKE_S):
                connection = await expected
        except BaseException as error:
            if expected.done() and not expected.cancelled():
                expected.result().close()  # which is the process' signal to end
            if isinstance(error, TimeoutError):
                raise BackendFailed(f"the {name} has not connected") from None
            raise
        finally:
            del self._expected[key]

        async def end(grace_s: float) -> None:
            with contextlib.suppress(BackendFailed, TimeoutError):  # on a machine that is lost it ends by itself
                if node.is_alive and (heads := self._supervisor.children):
                    async with asyncio.timeout(grace_s + _END_S):
                        await heads[0].call(EndProcess(node.offer, key, grace_s))

        return [Child(name, Process(pid, end), connection.reader, connection.writer)]

    async def _launch(self) -> list[Child]:
        env = ray_environment(self.token_file) if self.existing is None else {}
        return [await launch("cluster head", "tinker_server.backends.cluster.head", env)]

    async def _load(self, children: list[Child]) -> None:
        for node in self.nodes.values():  # their Ray belonged to the head before
            node.connection.close()
        [child] = children
        host, port = self.address.host, self.address.port
        if self.existing is None:
            await child.call(StartHead(host, self.address.ray_port))
            return
        invitation = Invitation(f"{host}:{port}", self._token, self.models, self.existing.node_dir)
        await child.call(UseRay(self.existing.address, invitation))

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to our port."""
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)
        connection = await accept(reader, writer, self._token)
        if connection is None:
            log.warning("a connection to the cluster's port, from %s, had no right token", _peer(writer))
            return
        match connection.said.get("ask"):
            case "join" if self.existing is not None:
                connection.send(
                    refused=f"it uses the Ray cluster at {self.existing.address}, whose machines join by themselves:"
                    " add this one to that with `ray start`"
                )
            case "join" | "node":
                await self._join(connection)
            case "leave":
                self._leave(connection)
            case "lines":
                await show(connection)
            case "model":
                await self._give(connection)
            case "process" if (expected := self._expected.get(str(connection.said.get("key")))) is not None:
                connection.send(welcome=True)
                expected.set_result(connection)
                return
            case other:
                connection.send(refused=f"it knows no request {other!r}")
        connection.close()

    async def _join(self, connection: Connection) -> None:
        if different := differences(dict(connection.said.get("versions", {})), versions()):
            connection.send(refused=f"this machine has {different}: install the same")
            return
        offer = Offer.from_json(connection.said["offer"])
        before = self.nodes.get(offer.name)
        try:
            if before is not None and before.is_alive:
                if offer.base_dir and offer.base_dir == before.offer.base_dir:  # the same, which lost it in a partition
                    before.connection.writer.transport.abort()
                    connection.send(later="the machine's former connection is being closed")
                    return
                raise BackendFailed(
                    f"a machine of the name {offer.name} is there already: give this one another --name"
                )
            for use in self.uses:
                use.check(offer)
        except BackendFailed as error:
            connection.send(refused=str(error))
            return
        if not self._supervisor.is_alive:
            connection.send(later="the server is starting Ray")
            return
        node = self.nodes[offer.name] = Node(offer, _peer(connection.writer), connection)
        log.info("%s joins from %s", offer.name, node.address)
        connection.send(ray_port=self.address.ray_port)
        for use in self.uses:
            use.begin(node, partial(self._start_there, node))
        try:
            while (said := await connection.receive()) is not None:
                node.is_leaving = node.is_leaving or said.get("leaves") is True
        finally:
            node.is_alive = False
            if node.is_leaving:
                del self.nodes[offer.name]
            log.warning("node %s %s", offer.name, "left" if node.is_leaving else "is lost; it may join again")
            await asyncio.gather(*(use.end(node) for use in self.uses))

    async def _give(self, connection: Connection) -> None:
        """Send the files of a served model to a machine."""
        name, served = str(connection.said.get("name")), self.models
        if name not in served:
            connection.send(refused=f"it serves no model {name}; it serves {', '.join(served)}")
            return
        with contextlib.suppress(ConnectionError):  # the machine asks again
            await give(connection, Path(served[name]))

    def _leave(self, connection: Connection) -> None:
        """Have a machine leave that somebody names."""
        name = str(connection.said.get("name"))
        if (node := self.nodes.get(name)) is None:
            names = ", ".join(self.nodes) or "none"
            connection.send(refused=f"no machine of the name {name} has joined; there are {names}")
            return
        if node.is_alive:
            node.is_leaving = True
            node.connection.send(leave=True)
        else:
            del self.nodes[name]
        connection.send(leaves=name)


def _peer(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername")[0])
