"""Commands to the process that runs Ray's head, which matches them by type."""

from dataclasses import dataclass

from backends.processes.rpc import Command


@dataclass(frozen=True)
class StartHead(Command[None]):
    """Start Ray's head. Always the first command."""

    address: str
    port: int
    """The port that other machines' Ray connects to."""
