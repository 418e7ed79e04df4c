"""Files of expert routing: the sampler writes which experts tokens went to, and the trainer sends them to the same.

Rounding alone sends some of a mixture's tokens to other experts in the trainer than in the engine, and changes their
log probabilities. Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370, train on sampled tokens with the experts that sampled them. The wire carries no routing, so a file is
found by a model's name and the tokens themselves.

T tokens, L layers of the decoder, K experts of a token
"""

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from backends.inputs.rendering import Rendered

log = logging.getLogger(__name__)
_MAX_BYTES = 4 << 30
"""Bytes of all files of one engine. A decoder of 48 layers with 8 experts per token takes 384 bytes a token."""
_ASIDE = "aside"
"""How the name of a file begins while it is written."""


def routing_name(owner: str, model_id: str, rendered: Rendered, sampled: Iterable[int] = ()) -> str:
    """Name the file of an input of a user's model, perhaps followed by tokens that were sampled after it."""
    digest = hashlib.sha256()
    for text in (owner, model_id, *(image.hash for image in rendered.images)):
        digest.update(len(text.encode()).to_bytes(4, "big") + text.encode())
    digest.update(rendered.token_ids_T.astype(np.int64).tobytes())
    digest.update(np.fromiter(sampled, np.int64).tobytes())
    return digest.hexdigest()


class RoutingFiles:
    """Writes routing files, in one process; it finds the files of an earlier one again. Several processes may write to
    one directory, each under its own `writer`."""

    def __init__(self, directory: Path, max_bytes: int = _MAX_BYTES, writer: str = "") -> None:
        """Beyond `max_bytes` the oldest files are deleted, of those that were there and of this writer."""
        self._directory = directory
        self._left_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """Bytes by name, the oldest first."""
        self._writing = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        self._aside = directory / f"{_ASIDE}{writer}"
        self._aside.unlink(missing_ok=True)
        for _, name, size in sorted(_files(directory)):
            self._count(name, size)

    def write(self, name: str, experts_TLK: np.ndarray) -> None:
        """Write or replace the file of this name. From any thread."""
        with self._writing:
            with self._aside.open("wb") as file:
                np.save(file, experts_TLK, allow_pickle=False)
            self._count(name, self._aside.stat().st_size)
            self._aside.replace(self._directory / name)

    def _count(self, name: str, size: int) -> None:
        self._left_bytes += self._sizes.pop(name, 0) - size
        while self._left_bytes < 0 and self._sizes:
            oldest = next(iter(self._sizes))
            self._left_bytes += self._sizes.pop(oldest)
            (self._directory / oldest).unlink(missing_ok=True)
        self._sizes[name] = size


def _files(directory: Path) -> Iterator[tuple[int, str, int]]:
    """Yield time of writing, name and size of each whole file; other writers may delete some meanwhile."""
    for file in directory.iterdir():
        if not file.name.startswith(_ASIDE):
            with contextlib.suppress(FileNotFoundError):
                state = file.stat()
                yield state.st_mtime_ns, file.name, state.st_size


def read_routing(directory: Path, name: str) -> np.ndarray | None:
    """Read [T, L, K] unsigned integers; None if there is no such file, or it is not whole."""
    try:
        with (directory / name).open("rb") as file:
            experts_TLK: np.ndarray = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:  # as after a power loss: these files are not durable
        log.warning("cannot read a file of expert routing: %s", error)
        return None
    return experts_TLK
