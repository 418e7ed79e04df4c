"""Weights that an engine on another machine has been sent, by the directory that they have on the server's.

The server sends them when an engine says that it does not have them, so that nobody needs to remember who has which.
Imports no vLLM: the server's end reads the files here too.
"""

import itertools
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from backends.processes.rpc import WeightsAbsent
from backends.protocol import InvalidInput

MAX_RECEIVED = 64
"""Versions that stay, the least recently used leave first. The engine has 32 loaded, whose files are links: what leaves
here while it is in use stays there."""


class ReceivedWeights:
    """The versions that one engine has been sent."""

    def __init__(self, directory: Path | None) -> None:
        """Without a `directory` the engine is on the server's own machine, and finds all weights where they are."""
        self._directory = directory
        self._versions: OrderedDict[Path, Path] = OrderedDict()
        """The least recently used first."""
        self._numbers = itertools.count()
        if directory is not None:
            directory.mkdir(parents=True)

    def local(self, weights: Path | None) -> Path | None:
        """Return the directory that weights have here. Raises WeightsAbsent."""
        return None if weights is None else self.require(weights)

    def require(self, weights: Path) -> Path:
        """Return the directory that weights have here. Raises WeightsAbsent."""
        if self._directory is None:
            return weights
        if weights not in self._versions:
            raise WeightsAbsent(f"weights {weights.name} have not been sent to this engine")
        self._versions.move_to_end(weights)
        return self._versions[weights]

    def receive(self, weights: Path, files: Mapping[str, pickle.PickleBuffer]) -> None:
        """Write the files of weights, which are there whole or not at all."""
        assert self._directory is not None
        directory = self._directory / str(next(self._numbers))
        directory.mkdir()
        for name, content in files.items():
            with (directory / name).open("wb") as file:
                file.write(content)
        self._versions[weights] = directory
        while len(self._versions) > MAX_RECEIVED:
            _, oldest = self._versions.popitem(last=False)
            shutil.rmtree(oldest, ignore_errors=True)


def read_files(weights: Path) -> dict[str, pickle.PickleBuffer]:
    """Return the files of weights, by name. Raises InvalidInput if they are gone."""
    try:
        return {
            path.name: pickle.PickleBuffer(path.read_bytes()) for path in sorted(weights.iterdir()) if path.is_file()
        }
    except FileNotFoundError:
        raise InvalidInput("the sampler weights no longer exist") from None
