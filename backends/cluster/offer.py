"""A machine's offer to a cluster, as it says it when it joins, and a server's invitation to the nodes of a cluster that
was there before."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Offer:
    """What a machine has, and how its processes reach the server."""

    name: str
    server: str
    """HOST:PORT of the cluster's port, as this machine reaches it."""
    token_file: str
    data_dir: str
    """Directory for weights in use, compiled kernels and the log of its engines."""
    models: Mapping[str, str]
    """Directories of its models, by the names that the server serves them under."""
    fingerprints: Mapping[str, str]
    """Fingerprint of each model's files, by name."""
    gpu_bytes: tuple[int, ...]
    """Memory of each of its GPUs."""
    environment: Mapping[str, str | None]
    """Variables that Ray changes, as they were before."""
    ray_label: str = ""
    """By which Ray knows it, this time: for a while it takes a machine that is lost for one that lives. In a cluster
    that exists, Ray's own number of the node."""
    base_dir: str = ""
    """A directory of this machine's user alone, with a short path, for the sockets of what holds its models' bases."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Offer":
        """Read it. Raises TypeError if it is none."""
        return cls(**{**said, "gpu_bytes": tuple(said["gpu_bytes"])})

    @property
    def received_dir(self) -> Path:
        """Return the directory of the weights that the server has sent to this machine."""
        return Path(self.data_dir) / "received"

    def scratch_dir(self, engine: int) -> Path:
        """Return the directory of an engine's weights on this machine."""
        return Path(self.data_dir) / f"engine-{engine}"


@dataclass(frozen=True)
class Invitation:
    """The server's request to the nodes of the cluster. It travels inside Ray, whose own token opens every node."""

    server: str
    """HOST:PORT of the cluster's port, as other machines reach it."""
    token: str = field(repr=False)
    models: Mapping[str, str]
    """Directories of the served models, by name."""
    data_dir: Path
    """Directory of a machine's files, of which each has a part of its own: they may share a file system."""
