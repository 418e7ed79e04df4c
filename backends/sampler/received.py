"""Weights that another machine has been sent for its engines, by the directory that they have on the server's.

The server sends them when an engine says that its machine does not have them, so that nobody needs to remember who has
which.
Imports no vLLM: the server's end reads the files here too.
"""

import contextlib
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tinker_server.backends.processes.rpc import WeightsAbsent
from tinker_server.backends.protocol import InvalidInput

MAX_RECEIVED = 64
"""Cached versions (LRU). Evicting one in use is safe: the engine holds links to its files, of 32 versions at most."""
_HIDDEN = "."
"""Names of directories that are written or removed now begin so."""


class ReceivedWeights:
    """The versions that a machine has been sent, for all of its engines, which have separate processes."""

    def __init__(self, directory: Path | None) -> None:
        """Without a `directory` the engine is on the server's own machine, and finds all weights where they are."""
        self._directory = directory
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def local(self, weights: Path | None) -> Path | None:
        """Return the directory that weights have here. Raises WeightsAbsent."""
        return None if weights is None else self.require(weights)

    def require(self, weights: Path) -> Path:
        """Return the directory that weights have here. Raises WeightsAbsent."""
        if self._directory is None:
            return weights
        held = self._directory / _name(weights)
        try:
            os.utime(held)  # the order in which they leave
        except FileNotFoundError:
            raise WeightsAbsent(f"weights {weights.name} have not been sent to this machine") from None
        return held

    def receive(self, weights: Path, files: Mapping[str, pickle.PickleBuffer]) -> None:
        """Write the files of weights, which are there whole or not at all."""
        assert self._directory is not None
        partly = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=self._directory))
        try:
            for name, content in files.items():
                with (partly / name).open("wb") as file:
                    file.write(content)
            with contextlib.suppress(OSError):  # another engine was sent them too
                partly.rename(self._directory / _name(weights))
        finally:
            shutil.rmtree(partly, ignore_errors=True)
        held = sorted(self._versions(), key=_last_use_ns)
        for oldest in held[: max(0, len(held) - MAX_RECEIVED)]:
            self._remove(oldest)

    def _remove(self, held: Path) -> None:
        """Remove a version, which other engines see whole or not at all."""
        going = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=self._directory))
        with contextlib.suppress(FileNotFoundError):  # another engine has removed it
            held.rename(going / "version")
        shutil.rmtree(going, ignore_errors=True)

    def _versions(self) -> list[Path]:
        assert self._directory is not None
        return [path for path in self._directory.iterdir() if not path.name.startswith(_HIDDEN)]


def _name(weights: Path) -> str:
    """Return the name of weights' directory here, from that on the server's machine."""
    return hashlib.sha256(str(weights).encode()).hexdigest()


def _last_use_ns(held: Path) -> int:
    """Return the time of a version's last use; 0 if another engine has just removed it."""
    try:
        return held.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def read_files(weights: Path) -> dict[str, pickle.PickleBuffer]:
    """Return the files of weights, by name. Raises InvalidInput if they are gone."""
    try:
        return {
            path.name: pickle.PickleBuffer(path.read_bytes()) for path in sorted(weights.iterdir()) if path.is_file()
        }
    except FileNotFoundError:
        raise InvalidInput("the sampler weights no longer exist") from None
