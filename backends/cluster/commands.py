"""Commands to the process that runs Ray's head, which matches them by type."""

from dataclasses import dataclass

from tinker_server.backends.cluster.offer import Invitation, Offer
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import Place
from tinker_server.backends.processes.rpc import Command


@dataclass(frozen=True)
class StartHead(Command[None]):
    """Start Ray's head. Always the first command, unless UseRay is."""

    address: str
    port: int
    """The port that other machines' Ray connects to."""


@dataclass(frozen=True)
class UseRay(Command[None]):
    """Connect to a Ray cluster that exists, and have its nodes join the server."""

    address: str
    invitation: Invitation


@dataclass(frozen=True)
class StartProcess(Command[int]):
    """Have a machine start a process of a model, which is then at the other end of a connection that the machine has
    opened to our port; return the process' number there."""

    offer: Offer
    key: str
    """What the connection asks with."""
    spec: ModelSpec
    place: Place


@dataclass(frozen=True)
class EndProcess(Command[None]):
    """Have a machine end a process, if it does not end by itself in so many seconds."""

    offer: Offer
    key: str
    grace_s: float
