"""Which experts the sampler sent tokens to, kept in files so that the trainer sends them to the same ones.

Rounding alone sends a part of a mixture's tokens elsewhere in the trainer than in the engine, and a token's log
probability with it. Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv:2510.11370, train on what was drawn by the experts that it was drawn with. The wire carries no routing,
so it is found again by what it was drawn from: one model's weights and the tokens themselves.

T tokens, L layers of the decoder, K experts of a token
"""

import hashlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from backends.inputs.rendering import Rendered

log = logging.getLogger(__name__)
_MAX_BYTES = 4 << 30
"""Of all files of one base model. A decoder of 48 layers with 8 experts for a token takes 384 bytes a token."""
_ASIDE = "aside"
"""What a file is called while it is written."""


def routing_name(owner: str, model_id: str, rendered: Rendered, sampled: Iterable[int] = ()) -> str:
    """The file of an input of a user's model, which may go on with tokens that were sampled after it."""
    digest = hashlib.sha256()
    for text in (owner, model_id, *(image.hash for image in rendered.images)):
        digest.update(len(text.encode()).to_bytes(4, "big") + text.encode())
    digest.update(rendered.token_ids_T.astype(np.int64).tobytes())
    digest.update(np.fromiter(sampled, np.int64).tobytes())
    return digest.hexdigest()


class RoutingFiles:
    """The writer's side, of one process; it finds the files of an earlier one again."""

    def __init__(self, directory: Path, max_bytes: int = _MAX_BYTES) -> None:
        """Beyond `max_bytes`, what was written first goes."""
        self._directory = directory
        self._left_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """By name, the oldest first."""
        self._writing = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _ASIDE).unlink(missing_ok=True)
        for file in sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime_ns):
            self._count(file.name, file.stat().st_size)

    def write(self, name: str, experts_TLK: np.ndarray) -> None:
        """In place of what is there under this name. From any thread."""
        with self._writing:
            aside = self._directory / _ASIDE
            with aside.open("wb") as file:
                np.save(file, experts_TLK, allow_pickle=False)
            self._count(name, aside.stat().st_size)
            aside.replace(self._directory / name)

    def _count(self, name: str, size: int) -> None:
        self._left_bytes += self._sizes.pop(name, 0) - size
        while self._left_bytes < 0 and self._sizes:
            oldest = next(iter(self._sizes))
            self._left_bytes += self._sizes.pop(oldest)
            (self._directory / oldest).unlink(missing_ok=True)
        self._sizes[name] = size


def read_routing(directory: Path, name: str) -> np.ndarray | None:
    """[T, L, K] of unsigned integers; None where nothing is kept of it, or no longer whole."""
    try:
        with (directory / name).open("rb") as file:
            experts_TLK: np.ndarray = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:  # as after a power loss: nothing here is made durable
        log.warning("what experts were sampled cannot be read: %s", error)
        return None
    return experts_TLK
