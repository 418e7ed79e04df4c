"""The command to a process that holds a base's weights."""

from dataclasses import dataclass

from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.rpc import Command


@dataclass(frozen=True)
class Hold(Command[None]):
    """Load the weights; answered once others can map them. The first command and the only one."""

    spec: ModelSpec
    gpu: int | None
    """The GPU, by the server's number; None on the CPU."""
